"""Who a page belongs to, and how a dashboard is started and refused."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections import defaultdict
from types import SimpleNamespace

import msgspec
import pytest
from robustrl_widgets import assets, showing
from robustrl_widgets.access import Access, argument, in_url, is_local, student_name
from robustrl_widgets.commands import Right
from robustrl_widgets.hosts import feed_of
from robustrl_widgets.sources import load_entries
from views_log import failing_log

import robustrl
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


@pytest.mark.parametrize(("given", "name"), [
    (b"Ada", "Ada"), (b" Ada ", "Ada"), (b"Name Less", "Name Less"), (b"NAME", ""), (b"name", ""), (b"YOURNAME", ""), (b"<name>", ""),
    (b"  ", ""), ("\u200b\u2060".encode(), ""), ("\uff2e\uff21\uff2d\uff25".encode(), ""), ("Jos\u00e9".encode(), "Jos\u00e9"),
])  # fmt: skip
def test_what_stands_for_a_name_in_an_address_is_none(given, name):
    assert student_name({"name": [given]}) == name and student_name({}) == ""


def test_the_printed_link_of_students_gives_no_name_for_them(capsys):
    showing._announce(Access.at("127.0.0.1"), "127.0.0.1", True, True, 5006)
    link = json.loads(capsys.readouterr().out)["student"]
    assert "&" not in link and "NAME" not in link


@pytest.mark.parametrize("query", [{}, {"name": [b"NAME"]}, {"name": [b"Ada"]}])
def test_a_student_without_a_name_is_asked_for_it(query, monkeypatch):
    pytest.importorskip("panel")
    from bokeh.document import Document
    from panel.io.state import set_curdoc
    from robustrl_widgets import dashboard
    from robustrl_widgets.feed import Feed
    from robustrl_widgets.sources import RecordedRun
    from views_log import failing_log

    access, names = Access.at("127.0.0.1", student='"student-token>'), []
    monkeypatch.setattr(type(dashboard.pn.state), "session_args", property(lambda self: {"token": [b'"student-token>'], **query}))
    monkeypatch.setattr(dashboard.pn.state, "on_session_destroyed", lambda call: None)
    views = SimpleNamespace(views=defaultdict(dashboard.pn.pane.Str))
    monkeypatch.setattr(dashboard, "_Session", lambda feed, right, name, **how: names.append(name) or views)
    page = dashboard.application(lambda: Feed(RecordedRun(failing_log())), access, shared=True)
    with set_curdoc(Document()):
        shown = page()
    if query.get("name") == [b"Ada"]:
        assert names == ["Ada"]
        return
    assert names == [] and isinstance(shown, dashboard.pn.pane.HTML)
    assert 'name="name" required' in shown.object and "value=\"&quot;student-token&gt;\"" in shown.object


@pytest.mark.parametrize(("query", "shown"), [({}, False), ({"token": [b"wrong"]}, False), ({"token": [b"viewers-token"]}, True)])
def test_the_name_of_the_job_is_in_the_title_of_those_alone_who_may_look(query, shown, monkeypatch):
    pytest.importorskip("panel")
    from panel.io.application import build_applications
    from robustrl_widgets import dashboard
    from robustrl_widgets.feed import Feed
    from robustrl_widgets.sources import RecordedRun

    class Stop(Exception):
        pass

    served: dict = {}

    def serve(apps, **how):
        served.update(build_applications(apps, title=how["title"]))
        raise Stop

    monkeypatch.setattr(dashboard.pn, "serve", serve)
    monkeypatch.setattr(type(dashboard.pn.state), "session_args", property(lambda self: query))
    monkeypatch.setattr(dashboard.pn.state, "on_session_destroyed", lambda call: None)
    views = SimpleNamespace(views=defaultdict(dashboard.pn.pane.Str))
    monkeypatch.setattr(dashboard, "_Session", lambda *given, **how: views)
    with pytest.raises(Stop):
        dashboard.serve(lambda: Feed(RecordedRun(failing_log())), Access.at("0.0.0.0", viewer="viewers-token"), shared=True,
                        title="RobustRL: secret")  # fmt: skip
    assert served["/"].create_document().title == ("RobustRL: secret" if shown else "RobustRL")


def test_a_page_whose_document_is_destroyed_is_unsubscribed_before_its_session_is_closed():
    """Bokeh takes the document apart first, and whatever came then raised in the thread of all pages."""
    pytest.importorskip("panel")
    from bokeh.document import Document
    from panel.io.state import set_curdoc
    from robustrl_widgets import dashboard
    from robustrl_widgets.feed import Feed
    from robustrl_widgets.sources import LiveRun
    from views_log import FakeJob, failing_log

    log = failing_log()
    job = FakeJob(log, len(log) - 5)
    feed, document = Feed(LiveRun(job)), Document()
    feed._thread = threading.current_thread()
    with set_curdoc(document):
        session = dashboard._Session(feed, Right.READ, "", may_play=False)
    seen = []
    feed.subscribe("board", lambda what, channel: seen.append(what))
    document.callbacks.on_change_dispatch_to(session)
    document.destroy(session)
    job.upto = len(log)
    feed._drawn.clear()
    feed.step()
    job.over = True  # each view has one more word: that its time stands still
    feed._drawn.clear()
    feed.step()
    assert len(seen) == 3 and [subscription.view for subscription in feed._subscriptions] == ["board"]
    session.close()


@pytest.mark.parametrize("origins", [(), ("hub.example.org:8000", "*.example.org", "evil; script-src *")])
def test_who_may_frame_the_page_is_said_with_each_answer(origins):
    """A page with an instructor's buttons in a stranger's frame is clicked by whoever is tricked into it."""
    pytest.importorskip("panel")
    import tornado.testing
    import tornado.web
    from robustrl_widgets.dashboard import _headers

    class Open(tornado.web.RequestHandler):
        def get(self):
            self.set_header("Access-Control-Allow-Origin", "*")
            self.set_header("access-control-allow-credentials", "true")

    class Served(tornado.testing.AsyncHTTPTestCase):
        def get_app(self):
            app = tornado.web.Application([("/", tornado.web.RequestHandler), ("/open", Open)])
            app.add_transform(_headers(origins))
            return app

        def runTest(self):
            for path in ("/", "/open", "/none"):
                said = self.fetch(path).headers
                assert not [name for name in said if name.startswith("Access-Control-")]
                more = "".join(f" {origin}" for origin in origins[:2])
                assert said["Content-Security-Policy"] == f"frame-ancestors 'self'{more}" and said["X-Content-Type-Options"] == "nosniff"
                assert said.get("X-Frame-Options") == (None if origins else "SAMEORIGIN")

    result = Served().run()
    assert result.wasSuccessful(), result.failures + result.errors


@pytest.mark.parametrize(("origin", "taken"), [
    ("hub.example.org", True), ("hub.example.org:8000", True), ("10.0.0.7:1", True), ("localhost:65535", True),
    ("*", False), ("*:*", False), ("*.example.org:80", False), ("hub:*", False), ("http://x:1", False), ("hub:1/", False), ("hub:", False),
    ("[::1]:8000", True), ("[2001:db8::7]", True),
    ("[::1]:0", False), ("[::1", False), ("::1", False), ("[1]:80", False), ("[::ff::]", False),
    (":80", False), ("", False), ("hub:0", False), ("hub:65536", False), ("hub:80\n", False), ("a..b", False), ("x; script-src y", False),
])  # fmt: skip
def test_an_origin_is_a_host_and_a_port_or_nothing_starts(monkeypatch, origin, taken):
    class Begun(Exception):
        pass

    def begin(*_):
        raise Begun

    monkeypatch.setattr(showing, "_feeds", begin)
    with pytest.raises(Begun if taken else ConfigError, match=None if taken else r"origin = .*must be HOST or HOST:PORT"):
        showing.show(run=None, job=None, demo=True, speed=1.0, address="127.0.0.1", port=0, origins=("hub:1", origin))


def test_an_origin_is_known_by_the_spelling_that_browsers_use():
    spelt = ["[2001:DB8:0:0::7]:8000", "[0:0:0:0:0:0:0:1]", "Hub:1"]
    assert [showing._origin(each) for each in spelt] == ["[2001:db8::7]:8000", "[::1]", "Hub:1"]


def test_no_page_of_another_origin_may_read_an_answer_or_load_this_one_as_a_script():
    """Bokeh answers /autoload.js to whoever asks, with a session in it and Access-Control-Allow-Origin: *."""
    pytest.importorskip("panel")
    import tornado.testing
    from robustrl_widgets import dashboard

    class Served(tornado.testing.AsyncHTTPTestCase):
        def get_app(self):
            self.server = dashboard.server_of(lambda: dashboard.pn.pane.Str("a page"), "127.0.0.1", dashboard._free_port("127.0.0.1"), ())
            return self.server._tornado

        def tearDown(self):
            self.server.unlisten()
            super().tearDown()

        def runTest(self):
            asked = {"Origin": "http://evil.example", "Cookie": "a=b"}
            for path, code in (("/", 200), ("/metadata", 200), ("/static/js/bokeh.min.js", 200), ("/favicon.ico", 200), ("/ws", 400),
                               ("/components/a", 400), ("/autoload.js?bokeh-autoload-element=x", 404), ("/none", 404)):  # fmt: skip
                for method in ("GET", "OPTIONS"):
                    answer = self.fetch(path, method=method, headers=asked)
                    assert answer.code == code if method == "GET" else answer.code in (404, 405), path
                    assert not [name for name in answer.headers if name.startswith("Access-Control-")], path

    result = Served().run()
    assert result.wasSuccessful(), result.failures + result.errors


@pytest.mark.parametrize("arguments", [["--demo", "--job", "x"], ["--job", "no-such-job"], ["/no/such/run"], ["--demo", "--speed", "0"],
                                       ["--demo", "--speed", "nan"]])  # fmt: skip
def test_what_cannot_be_shown_is_said(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["dashboard", *arguments]) == 2
    assert "robustrl: " in capsys.readouterr().err


def test_of_a_damaged_log_it_is_said_what_can_be_done_here(capsys, tmp_path):
    """It named an argument that the command has not."""
    lines = [msgspec.json.encode(entry) for entry in failing_log()]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join([*lines[:5], b"{", *lines[5:], b""]))
    assert cli.main(["dashboard", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"RoleBoard(robustrl.Run.load({str(tmp_path)!r}, partial=True)) shows what can be read" in said and "row 6" in said
    assert said.count("partial") == 1
    feed_of(robustrl.Run.load(tmp_path, partial=True)).whole()
    (tmp_path / "events.jsonl").write_bytes(b"{")
    assert cli.main(["dashboard", str(tmp_path)]) == 1 and "partial" not in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["--demo", "--job", "x"], "--job = 'x': not together with --demo: give one of RUN, --job, --demo"),
    (["/a", "--demo"], "RUN = '/a': not together with --demo:"), (["/a", "--job", "x", "--demo"], "not together with --job and --demo:"),
])  # fmt: skip
def test_of_two_things_to_show_both_are_named(arguments, said, capsys):
    assert cli.main(["dashboard", *arguments]) == 2
    assert said in capsys.readouterr().err


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


@pytest.mark.parametrize(("arguments", "said"), [
    (["--demo", "--speed", "0"], "speed = 0.0: must be above 0 and at most 100"),
    (["--demo", "--speed", "100.5"], "speed = 100.5: must be above 0 and at most 100"),
    (["--demo", "--speed", "inf"], "speed = inf: must be above 0"),
    (["--job", "x", "--speed", "60"], "speed = 60.0: must be 1, or left out, for a live job"),
    (["--demo", "--address", "fe80::1%lo"], "address = 'fe80::1%lo': must be without a zone"),
    (["--demo", "--address", ""], "address = '': must be an address of this machine, such as 127.0.0.1 or ::1, or 0.0.0.0 for all"),
    (["--demo", "--address", " "], "address = ' ': must be an address of this machine"),
    (["--demo", "--address", "[::1]"], "address = '[::1]': must be an address of this machine, such as 127.0.0.1 or ::1"),
])  # fmt: skip
def test_a_setting_that_cannot_be_is_named_with_what_is_allowed(arguments, said, capsys):
    assert cli.main(["dashboard", *arguments]) == 2
    assert f"robustrl: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(("address", "shown"), [
    ("::1", "[::1]"), ("0:0:0:0:0:0:0:1", "[::1]"), ("2001:DB8::7", "[2001:db8::7]"), ("127.0.0.1", "127.0.0.1"),
    ("localhost", "localhost"),
])  # fmt: skip
def test_an_address_stands_in_a_link_as_browsers_write_it(address, shown, capsys):
    assert in_url(address) == shown
    showing._announce(Access.at(address), address, False, True, 5006)
    assert json.loads(capsys.readouterr().out)["look"].startswith(f"http://{shown}:5006/")


def test_the_link_to_all_addresses_is_one_that_answers(capsys):
    for address, shown in (("0.0.0.0", "127.0.0.1"), ("::", "[::1]")):
        showing._announce(Access.at(address), address, False, True, 5006)
        assert json.loads(capsys.readouterr().out)["look"].startswith(f"http://{shown}:5006/?token=")


def _has(address: str) -> bool:
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(("address", "own"), [
    ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0:0:0:0:0:0:0:1", "[::1]"), ("::", "[::1]"),
])  # fmt: skip
def test_the_page_is_served_at_its_address_and_takes_websockets_from_there_alone(address, own):
    """Bokeh raised ValueError for ::1."""
    pytest.importorskip("panel")
    if not _has(address):
        pytest.skip(f"this machine has no {address}")
    import tornado.testing
    from robustrl_widgets import dashboard
    from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
    from tornado.websocket import websocket_connect

    class Served(tornado.testing.AsyncTestCase):
        @tornado.testing.gen_test
        async def runTest(self):
            port = dashboard._free_port(address)
            server = dashboard.server_of(lambda: dashboard.pn.pane.Str("a page"), address, port, ("hub.example.org", "[2001:db8::9]:80"))
            try:
                assert (await AsyncHTTPClient().fetch(f"http://{own}:{port}/")).code == 200
                taken = []
                for origin in (f"{own}:{port}", f"localhost:{port}", f"{own}:{port + 1}", own, f"[2001:db8::7]:{port}", "evil.example",
                               f"[::1].evil.example:{port}", f"hub.example.org:{port}", "hub.example.org", "[2001:db8::9]:80"):  # fmt: skip
                    ask = HTTPRequest(f"ws://{own}:{port}/ws", headers={"Origin": f"http://{origin}"})
                    try:
                        (await websocket_connect(ask, subprotocols=["bokeh", "x"])).close()
                        taken.append(origin)
                    except HTTPClientError as error:
                        assert error.code == 403, origin
                assert taken == [f"{own}:{port}", f"localhost:{port}", "hub.example.org", "[2001:db8::9]:80"]
            finally:
                server.unlisten()

    result = Served().run()
    assert result.wasSuccessful(), result.failures + result.errors


def test_at_the_port_that_browsers_leave_out_the_origin_is_known_too():
    from robustrl_widgets.dashboard import _origins

    assert "[::1]" in _origins("::1", 80, ()) and "[::1]" not in _origins("::1", 81, ())


def load_scene():
    from robustrl_widgets.scene import Scene

    scene = Scene()
    for entry in load_entries(showing.SAMPLE):
        scene.apply(entry)
    return scene


def test_the_sample_is_a_run_with_failures_that_healed():
    scene = load_scene()
    assert not scene.doubts and scene.state.status == "done"
    assert len(scene.episodes.all) >= 2 and all(episode.healed for episode in scene.episodes.all)
    assert {episode.record.role for episode in scene.episodes.all} >= {"rollout-1", "trainer-0"}


def test_the_demo_begins_where_something_happens_with_what_was_before():
    """Half a minute of start-up was all that its first half a minute showed."""
    feeds, _, _ = showing._feeds(None, None, True, 1.0)
    feed = feeds()
    scene, now = feed.still()
    first = min(view.injected for view in load_scene().state.faults.faults.values())
    assert 0.5 <= first - scene.state.t0 - now <= 5.0 and scene.state.step > 0 and scene.state.status == "running"
    whole, _, _ = showing._feeds(showing.SAMPLE, None, False, 1.0)
    assert whole().still()[1] < 1.0, "a run of one's own begins at its beginning"


def test_every_view_is_drawn_by_one_file_for_both_hosts():
    from robustrl_widgets.scene import VIEWS

    assert set(assets.NAMES) == set(VIEWS)
    with pytest.raises(ValueError, match="must be one of board"):
        assets.esm("../secret")


def test_a_page_that_is_closed_in_the_middle_of_a_message_is_no_error_and_all_else_is_said(caplog):
    """A traceback of tornado's WebSocketClosedError stood in the dashboard's log for each page that was closed."""
    pytest.importorskip("panel")
    from robustrl_widgets.dashboard import _but_closed_pages
    from tornado.websocket import WebSocketClosedError

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_but_closed_pages)

    async def fail(error: Exception) -> None:
        raise error

    for error in (WebSocketClosedError("Client connection has been closed"), ValueError("a defect")):
        task = loop.create_task(fail(error))
        loop.run_until_complete(asyncio.wait([task]))
        del task
        gc.collect()  # nobody has asked how it ended
    loop.call_soon(lambda: (_ for _ in ()).throw(WebSocketClosedError()))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    said = [record.getMessage().splitlines()[0] for record in caplog.records if record.name == "asyncio"]
    assert len(said) == 2 and "never retrieved" in said[0] and "callback" in said[1]
    assert "a defect" in str(caplog.records[0].exc_info[1])
