"""Who a page belongs to, and how a dashboard is started and refused."""

from __future__ import annotations

import socket

import pytest
from robustrl_widgets import assets, showing
from robustrl_widgets.access import Access, argument, is_local
from robustrl_widgets.commands import Right
from robustrl_widgets.sources import load_entries

from robustrl import cli
from robustrl.errors import ConfigError


@pytest.mark.parametrize(("address", "local"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("10.0.0.7", False),
    ("example.org", False), ("", False),
])  # fmt: skip
def test_an_address_that_others_reach_needs_a_token_to_look(address, local):
    access = Access.at(address)
    assert is_local(address) is local
    assert access.right("") is (Right.READ if local else None)
    assert access.right(access.viewer) is Right.READ
    assert access.right(access.student) is Right.STUDENT
    assert access.right(access.instructor) is Right.INSTRUCTOR


def test_a_wrong_token_opens_nothing_not_even_where_looking_is_free():
    access = Access.at("127.0.0.1")
    for wrong in ("x", access.instructor[:-1], access.instructor + "x", access.instructor.upper() + "y", "\ud800", "\u00e9" * 24):
        assert access.right(wrong) is None
    assert Access.at("127.0.0.1").instructor != access.instructor


def test_tokens_of_ones_own_are_checked():
    assert Access.at("0.0.0.0", instructor="a" * 12).right("a" * 12) is Right.INSTRUCTOR
    for wrong in ({"instructor": "short"}, {"student": "\u00e9" * 20}, {"student": "b" * 12, "viewer": "b" * 12}):
        with pytest.raises(ConfigError, match="token"):
            Access.at("0.0.0.0", **wrong)


def test_an_argument_of_a_page_is_cut():
    assert argument({}, "token") == ""
    assert argument({"name": [b"A" * 99999]}, "name", 40) == "A" * 39 + "\u2026"
    assert "\x1b" not in argument({"name": [b"\x1b[31m\xff"]}, "name")


@pytest.mark.parametrize("arguments", [["--demo", "--job", "x"], ["--job", "no-such-job"], ["/no/such/run"], ["--demo", "--speed", "0"],
                                       ["--demo", "--speed", "nan"]])  # fmt: skip
def test_what_cannot_be_shown_is_said(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["dashboard", *arguments]) == 2
    assert "robustrl: " in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["--port", "99999"], "port = 99999: must be 0, for a free one, to 65535"),
    (["--port", "-1"], "port = -1: must be 0, for a free one, to 65535"),
    (["--address", "203.0.113.9"], "address = '203.0.113.9': must be an address of this machine, such as 127.0.0.1"),
    (["--address", "203.0.113.9", "--port", "5006"], "address = '203.0.113.9': must be an address of this machine"),
    (["--address", "127.0.0.1:5006"], "address = '127.0.0.1:5006': must be an address of this machine"),
    (["--address", "x" * 70], "address = 'xxx"),
    (["--port", "PORT"], "port = PORT: cannot listen on 127.0.0.1"),
])  # fmt: skip
def test_where_it_cannot_listen_the_one_at_fault_is_named(arguments, said, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["dashboard", "--demo", *(port if part == "PORT" else part for part in arguments)]) == 2
    assert f"robustrl: {said.replace('PORT', port)}" in capsys.readouterr().err


def test_the_sample_is_a_run_with_failures_that_healed():
    from robustrl_widgets.scene import Scene

    scene = Scene()
    for entry in load_entries(showing.SAMPLE):
        scene.apply(entry)
    assert not scene.doubts and scene.state.status == "done"
    assert len(scene.episodes.all) >= 2 and all(episode.healed for episode in scene.episodes.all)
    assert {episode.record.role for episode in scene.episodes.all} >= {"rollout-1", "trainer-0"}


def test_every_view_is_drawn_by_one_file_for_both_hosts():
    from robustrl_widgets.scene import VIEWS

    assert set(assets.NAMES) == set(VIEWS)
    with pytest.raises(ValueError, match="must be one of board"):
        assets.esm("../secret")
