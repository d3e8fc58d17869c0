"""Every bad setting is answered with its field, its value and what is allowed; profiles fill in what was left open."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from robustrl import config
from robustrl.config import (
    Deadlines,
    GRPOConfig,
    JobConfig,
    check,
    check_room,
    in_words,
    load_config,
    make_config,
)
from robustrl.errors import ConfigError, PeerDied, RobustRLError, WaitTimeout, counted
from robustrl.requirements import check_machine, memory_needed, settle_standbys
from robustrl.runtime import namespaces

GIB = 1 << 30


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(make_config(settings))
    return str(caught.value)


def test_the_defaults_are_accepted():
    for settings in ({}, {"profile": "class"}, {"address": "auto", "nodes": 1}, {"trainer_ranks": 2}, {"task": "reasoning_gym:chain_sum"}):
        check(make_config(settings))


@pytest.mark.parametrize(("settings", "text"), [
    ({"rollouts": 0}, "rollouts = 0: must be at least 1"),
    ({"steps": 0}, "steps = 0: must be at least 1"),
    ({"samples_per_prompt": 1}, "samples_per_prompt = 1: must be at least 2"),
    ({"staleness": -1}, "staleness = -1: must be at least 0"),
    ({"agent_workers": 0}, "agent_workers = 0: must be at least 1"),
    ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens = 0: must be at least 1"),
    ({"grpo": {"kl_coefficient": math.nan}}, "grpo.kl_coefficient = nan: must be at least 0"),
    ({"grpo": {"learning_rate": 0}}, "grpo.learning_rate = 0.0: must be greater than 0 and finite"),
    ({"grpo": {"clip": 1.5}}, "grpo.clip = 1.5: must be at most 1"),
    ({"seed": 2**63}, "seed = 9223372036854775808: must be at most 9223372036854775807"),
    ({"steps": 10**22}, "steps = 10000000000000000000000: must be at most 1000000000"),
    ({"deadlines": {"call": 1e300}}, "deadlines.call = 1e+300: must be at most 10000000"),
    ({"deadlines": {"pull": -1}}, "deadlines.pull = -1.0: must be greater than 0 and finite"),
    ({"deadlines": {"stop": math.inf}}, "deadlines.stop = inf: must be greater than 0 and finite"),
    ({"address": ""}, "address = '': must be HOST:PORT of a Ray cluster's GCS, or 'auto'; None starts raylets of our own"),
    ({"nodes": 2}, "nodes = 2: must be at least 3: one for management, one for the trainer, one for rollouts; profile='class' runs on one"),
    ({"hosts": "namespaces", "profile": "class"}, "hosts = 'namespaces': is for two or more nodes of our own on this machine: not with "
                                                  "address=, nor with nodes=1"),
    ({"hosts": "namespaces", "address": "auto"}, "hosts = 'namespaces': is for two or more nodes of our own on this machine: not with "
                                                 "address=, nor with nodes=1"),
    ({"nodes": -1, "profile": "class"}, "nodes = -1: must be at least 1"),
    ({"trainer_ranks": 8}, "trainer_ranks = 8: must be at most 4, the trainer slots of the one trainer node (profile 'lab'); "
                           "with address= the cluster's resources decide"),
    ({"trainer_ranks": 4, "profile": "class"},
     "trainer_ranks = 4: must be at most 2, the trainer slots of the one trainer node (profile 'class'); "
     "with address= the cluster's resources decide"),
    ({"trainer_ranks": 3},
     "trainer_ranks = 3: must divide the 128 trajectories of a step (prompts_per_step x samples_per_prompt = 16 x 8)"),
    ({"name": "my job"}, "name = 'my job': must be 1 to 32 letters, digits, - and _, the first a letter"),
    ({"name": "../x"}, "name = '../x': must be 1 to 32 letters, digits, - and _, the first a letter"),
    ({"task": "arithmetics"}, "task = 'arithmetics': there is no such task; there are arithmetic, arithmetic_tool, arithmetic_long, "
                              "reasoning_gym:NAME, jsonl:PATH and hf:DATASET"),
    ({"task": "jsonl:/no/such.jsonl"}, "task = 'jsonl:/no/such.jsonl': there is no file /no/such.jsonl"),
    ({"run_dir": ""}, "run_dir = '': must be the folder in which the run gets a folder of its own; the working directory is '.'"),
    ({"model": ""}, "model = '': must be 'tiny', a folder with a Hugging Face causal LM, or a hub name; the working directory is '.'"),
    ({"model": "/no/such/model"},
     "model = '/no/such/model': there is no such folder; must be 'tiny', a folder with a Hugging Face causal LM, or a hub name"),
    ({"reward": "no function"}, "reward = 'no function': must be module:function, or a function given to robustrl.launch"),
    ({"engine": "sglang"}, "engine = 'sglang': must be one of auto, vllm, torch"),
    ({"profile": "home"}, "profile = 'home': must be one of lab, class"),
    ({"steps": "many"}, "steps = 'many': expected int, got str"),
    ({"steps": 2.5}, "steps = 2.5: expected int, got float"),
    ({"grpo": {"micro_batch": None}}, "grpo.micro_batch = None: expected int, got None"),
    ({"grpo": GRPOConfig(micro_batch="x")}, "grpo.micro_batch = 'x': expected int, got str"),  # type: ignore[arg-type]
])
def test_what_is_not_allowed_is_named_with_its_value(settings, text):
    assert refused(**settings) == text


@pytest.mark.parametrize(("settings", "hint"), [
    ({"learning_rate": 1e-3}, "did you mean grpo.learning_rate? There"),
    ({"stepz": 3}, "did you mean steps? There"),
    ({"model_name": "x"}, "did you mean model? There"),
    ({"eval": 3}, "did you mean evaluation_prompts or evaluation_every? There"),
    ({"deadlines": {"pulls": 3}}, "did you mean deadlines.pull? There"),
    ({"sampling": {"temp": 1}}, "did you mean sampling.temperature? There"),
    ({"nonsense": 1}, "there"), ({"nope": 2}, "there"), ({"qqqqqq": 1}, "there"), ({"x": 1}, "there"),
    ({"deadlines": {"nope": 1}}, "there"), ({"deadlines": {"steps": 1}}, "there"), ({"deadlines": {1: 2}}, "there"),
    ({"grpo": {"lr": 1}}, "there"), ({"recovery": {"nodes": 1}}, "there"),
])
def test_an_unknown_name_is_answered_with_what_is_near_and_allowed_there(settings, hint):
    (section, given), kind, field = next(iter(settings.items())), JobConfig, next(iter(settings))
    if isinstance(given, dict):
        kind = type(getattr(JobConfig(), section))
        field, given = f"{section}.{next(iter(given))}", next(iter(given.values()))
    assert refused(**settings) == f"{field} = {given!r}: there is no such setting; {hint} are: {', '.join(kind.__struct_fields__)}"


def test_what_is_of_another_type_is_told_in_pythons_words():
    assert refused(sampling={"max_tokens": {}}) == "sampling.max_tokens = {}: expected int | None, got settings by name"
    assert refused(name=["a"]) == "name = ['a']: expected str, got a list"


def test_an_address_is_a_place_or_auto():
    for address in ("auto", "10.0.0.1:6379", "head.example.org:1", "[fd00::1]:65535"):
        check(make_config({"address": address}))
    for address in ("1.2.3.4", "1.2.3.4:", ":6379", "1.2.3.4:0", "1.2.3.4:65536", "1.2.3.4:x", "ray://1.2.3.4:10001", "local", " ", "a b:1",
                    "fd00::1"):
        assert refused(address=address) == (f"address = {address!r}: must be HOST:PORT of a Ray cluster's GCS, or 'auto'; "
                                            "None starts raylets of our own")


def test_a_pickled_reward_must_be_there(tmp_path):
    path = str(tmp_path / "x.pkl")
    assert refused(reward=path).startswith(f"reward = {path!r}: there is no such file; must be module:function")
    Path(path).touch()
    check(make_config({"reward": path}))


def test_a_wait_that_ended_too_soon_names_the_deadlines_that_are_shorter_than_usual():
    late, hasty = WaitTimeout("node-0 did not come up\n--- its log"), make_config({"deadlines": {"call": 1e-6, "pull": 90}})
    assert in_words(late, JobConfig()) == str(late)
    assert in_words(late, hasty) == "node-0 did not come up (shorter than by default: deadlines.call = 1e-06)\n--- its log"
    died = PeerDied("rollout-0 died")
    assert in_words(died, hasty) == "rollout-0 died"
    died.__cause__, late.__cause__ = late, TimeoutError()
    assert in_words(died, hasty) == "rollout-0 died (shorter than by default: deadlines.call = 1e-06)"
    assert "deadlines.call" in in_words(late, hasty)
    assert in_words(ConfigError("steps", 0, "is wrong"), hasty) == "steps = 0: is wrong"
    assert in_words(RobustRLError("\x1b[36mray\x1b[39m::x"), hasty) == "ray::x"


def test_every_deadline_must_be_positive():
    for field in Deadlines.__struct_fields__:
        assert refused(deadlines={field: 0}).startswith(f"deadlines.{field} = 0.0: ")


def test_a_model_folder_needs_a_configuration(tmp_path):
    assert "is a folder without config.json" in refused(model=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check(make_config({"model": tmp_path}))
    check(make_config({"model": "Qwen/Qwen3-0.6B"}))  # a hub name: the host looks it up


def test_values_that_are_no_plain_data_are_named():
    with pytest.raises(ConfigError, match="^steps = <object"):
        make_config({"steps": object()})


def test_profiles_fill_in_what_is_left_open():
    lab, small = make_config({}), make_config({"profile": "class"})
    assert (lab.engine, lab.nodes) == ("vllm", 4)
    assert (small.engine, small.nodes, small.rollouts) == ("torch", 1, 2) and small.object_store_mb < lab.object_store_mb
    mixed = make_config({"profile": "class", "engine": "vllm", "nodes": 3})
    assert (mixed.engine, mixed.nodes) == ("vllm", 3)
    assert JobConfig(profile="class") == small == msgspec.json.decode(msgspec.json.encode(small), type=JobConfig)


def test_a_job_outlives_its_owner_on_an_existing_cluster_unless_told_otherwise():
    cases = [({}, False), ({"address": "auto"}, True), ({"address": "auto", "keep_alive": False}, False), ({"keep_alive": True}, True)]
    for settings, expected in cases:
        assert make_config(settings).outlives_owner is expected


def test_files(tmp_path):
    toml, broken, other = tmp_path / "job.toml", tmp_path / "job.json", tmp_path / "job.yaml"
    toml.write_text('steps = 7\n[grpo]\nclip = 0.3\n')
    assert load_config(toml) == make_config({"steps": 7, "grpo": {"clip": 0.3}})
    toml.write_text("learning_rate = 1\n")
    with pytest.raises(ConfigError, match=r"learning_rate = 1: there is no such setting; did you mean grpo.learning_rate\? There are"):
        load_config(toml)
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"config file = '.*job.json': cannot be read: "):
        load_config(broken)
    broken.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config file = '.*job.json': cannot be read: it is nested too deeply"):
        load_config(broken)
    toml.write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"config file = '.*job.toml': cannot be read: "):
        load_config(toml)
    broken.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold settings by name, not a list"):
        load_config(broken)
    with pytest.raises(ConfigError, match=r"must end in .toml or .json"):
        load_config(other)
    with pytest.raises(ConfigError, match="cannot be read: .*No such file"):
        load_config(tmp_path / "none.toml")


def short_of_memory(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_machine(make_config(settings), (GIB, "control group /x, limit 1.00 GiB"))
    return str(caught.value)


def test_too_little_memory_is_stated_with_need_and_bound():
    text = (r"memory = '1.0 GiB': about \d.\d GiB are needed for 4 nodes with object_store_mb = 128, 2 vllm rollouts, 1 trainer rank and "
            r"2 agent workers, most of it for rollouts = 2 \(4.0 GiB\) \(bound: control group /x, limit 1.00 GiB\); "
            r"fewer rollouts, fewer nodes, engine='torch' or profile='class' would need less")
    assert re.fullmatch(text, short_of_memory())
    check_machine(make_config({"profile": "class"}), (3 * GIB, "control group /x, limit 3.00 GiB"))
    check_machine(make_config({"address": "auto"}), (0, "elsewhere"))


@pytest.mark.parametrize("missing, why", [("ip", r"not installed: ip \(package iproute2\)"), ("", "it takes root")])
def test_hosts_of_their_own_are_refused_with_the_reason_where_they_cannot_be(monkeypatch, missing, why):
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == missing else f"/bin/{name}")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=rf"hosts = 'namespaces': is not possible here: .*{why}"):
        check_machine(make_config({"profile": "class", "nodes": 2, "hosts": "namespaces"}), (8 * GIB, "here"))


def test_one_of_a_kind_is_told_in_the_singular():
    text = short_of_memory(profile="class", rollouts=1, agent_workers=1)
    assert "needed for 1 node with object_store_mb = 80, 1 torch rollout, 1 trainer rank and 1 agent worker, most" in text
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


def test_what_takes_most_of_the_memory_is_named_and_may_be_less():
    text = short_of_memory(profile="class", agent_workers=10000)
    assert "10000 agent workers, most of it for agent_workers = 10000 (900.0 GiB)" in text and "fewer agent_workers would need" in text


def test_an_object_store_is_no_larger_than_what_holds_it():
    roomy = (4096 * GIB, "free memory of the machine")
    check_machine(make_config({"object_store_mb": 20000}), roomy, mount=20 * GIB)
    check_machine(make_config({"object_store_mb": 8000}), roomy, mount=64 << 20)  # on the disk
    with pytest.raises(ConfigError, match=r"object_store_mb = 20000: must be at most 16384: the shared-memory mount has 16.0 GiB"):
        check_machine(make_config({"object_store_mb": 20000}), roomy, mount=16 * GIB)


def test_what_would_need_less_memory_is_not_what_is_in_use_already():
    assert short_of_memory(profile="class").endswith("; fewer rollouts would need less")
    assert short_of_memory(profile="class", rollouts=1).endswith("; this is the smallest job: end other programs, or raise that bound")
    assert "; fewer trainer_ranks or standbys=0 would" in short_of_memory(profile="class", rollouts=1, trainer_ranks=2, standbys=1)
    assert "; engine='torch' would" in short_of_memory(profile="class", rollouts=1, engine="vllm")


def test_a_large_object_store_counts_as_memory():
    roomy = (64 * GIB, "free memory of the machine")
    check_machine(make_config({"object_store_mb": 4096}), roomy)
    text = r"84\.\d GiB are needed for 4 nodes with object_store_mb = 20000.*; a smaller object_store_mb \(128\),"
    with pytest.raises(ConfigError, match=text):
        check_machine(make_config({"object_store_mb": 20000}), roomy)


def test_a_nested_setting_given_as_one_value_says_what_is_meant():
    for settings, text in (
        ({"recovery": "full"}, "recovery = 'full': must be settings by name, e.g. recovery={'mode': 'full'}; there are mode, standbys"),
        ({"recovery": "warm"}, "recovery = 'warm': must be settings by name, e.g. recovery={'standbys': 'warm'}; there are mode, standbys"),
        ({"recovery": None}, "e.g. recovery={'mode': 'isolated'}; there are mode, standbys"),
        ({"recovery": ["full"]}, "e.g. recovery={'mode': 'isolated'}; there are mode, standbys"),
        ({"sampling": 0.5}, "sampling = 0.5: must be settings by name, e.g. sampling={'temperature': 1.0}; there are temperature, top_p, "),
        ({"task_options": 3}, "task_options = 3: must be settings by name, e.g. task_options={'max_tokens': 28}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            make_config(settings)
    nested = [name for name, hint in get_type_hints(JobConfig).items() if isinstance(hint, type) and issubclass(hint, msgspec.Struct)]
    assert len(nested) >= 4
    for name in nested:
        with pytest.raises(ConfigError, match=f"^{name} = 1: must be settings by name, e.g. {name}={{"):
            make_config({name: 1})


def test_a_model_has_so_many_positions_before_anything_starts(tmp_path):
    for model, positions in (("tiny", 1024), (str(tmp_path), 32)):
        (tmp_path / "config.json").write_text('{"max_position_embeddings": 32}')
        check(make_config({"model": model, "max_model_len": positions, "sampling": {"max_tokens": 8}}))
        with pytest.raises(ConfigError, match=f"max_model_len = 4096: must be from 2 to {positions}, the positions of the model"):
            check(make_config({"model": model, "max_model_len": 4096}))
    for unknown in ("{}", "[]", "rubbish", '{"max_position_embeddings": null}', "[" * 100_000):
        (tmp_path / "config.json").write_text(unknown)
        check(make_config({"model": str(tmp_path), "max_model_len": 4096}))
    check(make_config({"model": "some/model", "max_model_len": 4096}))


def test_a_completion_must_fit_behind_its_prompt():
    for settings, text in (
        ({"sampling": {"max_tokens": 1024}}, "sampling.max_tokens = 1024: must be at most 1023: max_model_len = 1024 bounds"),
        ({"task_options": {"max_tokens": 64}, "max_model_len": 64}, "task_options['max_tokens'] = 64: must be at most 63: max_"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            check(make_config(settings))
    check(make_config({"sampling": {"max_tokens": 8}, "task_options": {"max_tokens": 5000}}))  # the first is in force
    check(make_config({"max_model_len": 20}))  # the task's own length is cut off where the engine's ends
    config = make_config({"sampling": {"max_tokens": 1020}})
    check_room(config, 4, "1+1=")
    with pytest.raises(ConfigError, match=r"sampling.max_tokens = 1020: must be at most 1019: .* and the prompt '1\+1=' has 5 tokens"):
        check_room(config, 5, "1+1=")


def test_the_estimate_knows_engines_roles_and_a_model_of_ones_own(tmp_path):
    small = memory_needed(make_config({"profile": "class"}))
    assert small <= 3 * GIB  # what the profile promises
    assert memory_needed(make_config({"profile": "class", "engine": "vllm"})) - small == pytest.approx(2 * 1.6 * GIB)
    (tmp_path / "config.json").write_text("{}")
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(GIB)
    assert memory_needed(make_config({"profile": "class", "model": str(tmp_path)})) - small == 16 * GIB


def test_every_number_has_a_bound():
    """A setting added without one would be accepted whatever its value."""
    bounded = {*config._AT_LEAST, *config._ABOVE_ZERO, "nodes"}
    numbers = {name for name in config._fields(JobConfig) if isinstance(config._get(JobConfig(), name), int | float)
               and not isinstance(config._get(JobConfig(), name), bool)}
    assert numbers <= bounded, numbers - bounded


def test_settings_from_a_path_object(tmp_path):
    assert make_config({"run_dir": Path("x")}).run_dir == "x"


def test_recovery_begins_as_asked_and_warm_only_where_there_are_standbys() -> None:
    def first(**settings: object) -> tuple[str, str]:
        event = make_config({"profile": "class", **settings}).first_recovery()
        return event.mode, event.standbys

    assert first() == ("isolated", "cold") and first(standbys=2) == ("isolated", "warm")
    assert first(recovery={"mode": "full", "standbys": "warm"}) == ("full", "warm")
    with pytest.raises(ConfigError, match=r"recovery\.mode.*observe, isolated, full"):
        make_config({"recovery": {"mode": "partial"}})
    with pytest.raises(ConfigError, match="standbys"):
        check(make_config({"standbys": -1}))


def test_a_standby_comes_by_itself_only_in_the_lab_and_where_memory_allows() -> None:
    def settled(free: float, **settings: object) -> int | None:
        return settle_standbys(make_config(settings), (int(free * 2**30), "made up")).standbys

    assert settled(64) == 1 and settled(6) == 0
    assert settled(64, profile="class") == 0 and settled(64, address="auto") == 0 and settled(6, standbys=3) == 3
