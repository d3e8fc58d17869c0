"""What is installed of the views: the wheel, built and unpacked where nothing else is."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_holds_every_script_style_and_sample(tmp_path):
    """Built from this checkout and unpacked where nothing else is: the board renders, and the demo's run can be read."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    own = {path.relative_to(ROOT / "widgets") for path in (ROOT / "widgets" / "robustrl_widgets").rglob("*")
           if path.is_file() and path.suffix in (".js", ".css", ".gz", ".json", ".py")}  # fmt: skip
    assert {path for path in own if not (tmp_path / "site" / path).is_file()} == set()
    assert list((tmp_path / "site").glob("*.data/data/etc/jupyter/jupyter_server_config.d/robustrl_widgets.json"))
    program = """if True:
        import json, robustrl_widgets
        from robustrl_widgets import assets, ghost_files, showing, static
        from robustrl_widgets.scene import Scene, VIEWS
        from robustrl_widgets.sources import load_entries
        scene = Scene()
        for entry in load_entries(showing.SAMPLE): scene.apply(entry)
        scene.race.ghost = ghost_files.find(scene.state.config, None)
        assert scene.race.ghost is not None
        for view in assets.NAMES: assert assets.esm(view) and json.dumps(scene.picture(view, scene.t))
        print(robustrl_widgets.__file__, len(static.timeline_svg(scene, scene.t)) > 5000, "panel" in __import__("sys").modules)
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path,
                            env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"})  # fmt: skip
    assert result.stdout.split() == [str(tmp_path / "site" / "robustrl_widgets" / "__init__.py"), "True", "False"], result.stderr
