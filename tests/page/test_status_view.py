"""The status of the page: a fleet at work, an engine that is killed, a server that starts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from penstock.api.routes.response_schemas import REPLIES
from tests.adapters import make_adapter
from tests.integration.server import Server, wait_until
from tests.page.visit import Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STREAMS = """
(count) => {
  window.stopper = new AbortController();
  for (let index = 0; index < count; index += 1) {
    fetch("v1/completions", {
      method: "POST", signal: window.stopper.signal, headers: {"Content-Type": "application/json"},
      body: JSON.stringify({prompt: "x", max_tokens: 1500, stream: true}),
    }).then((reply) => reply.text()).catch(() => {});
  }
}
"""


SHOW = """
(state) => {
  Object.defineProperty(document, "visibilityState", {value: state, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapters = tmp_path_factory.mktemp("adapters")
    make_adapter(adapters / "a")
    options = ("--engine", "synthetic", "--synthetic-step-ms", "10", "--api-server-count", "2")
    own = (
        "--data-parallel-size",
        "2",
        "--enable-lora",
        "--lora-dir",
        str(adapters),
        "--allow-loopback-admin",
    )
    with Server(*options, *own, directory=tmp_path_factory.mktemp("fleet")) as running:
        yield running


def figure(name: str) -> str:
    """Selector of a figure's value."""
    return f".figures div:has(dt:text-is('{name}')) dd"


def test_a_fleet_at_work_and_an_engine_that_is_killed(browser: Browser, fleet: Server) -> None:
    with Visit(browser, f"{fleet.url}/#status") as visit:
        visit.wait_ready()
        assert "penstock-demo" in visit.find(".subject").inner_text()
        visit.wait_for(".panel:has(h2:text-is('API servers')) tbody tr:nth-child(2)")
        visit.page.evaluate(STREAMS, 3)
        visit.wait_for(figure("Running"), "3")
        plot = visit.find(".plot svg").first
        visit.page.wait_for_function(
            "() => parseFloat(document.querySelector('.plot .value').textContent.replace(',', '')) > 50"
        )
        assert "Generated tokens/s" in (plot.get_attribute("aria-label") or "")
        drawn = visit.find(".plot .line").first.get_attribute("d")
        visit.page.wait_for_function(
            "(old) => document.querySelector('.plot .line').getAttribute('d') !== old", arg=drawn
        )
        visit.page.evaluate("window.stopper.abort()")
        visit.wait_for(figure("Running"), "0")

        fleet.children("engine")[0].kill()
        visit.wait_for(
            ".events .bad", "Engine 0 has restarted"
        )  # it may be back before a reading shows it down
        visit.wait_ready()
        visit.wait_for(figure("Restarts"), "1")
        visit.wait_for(figure("Engines ready"), "2 of 2")


def test_adapters_come_and_go(browser: Browser, fleet: Server) -> None:
    with Visit(browser, f"{fleet.url}/#status") as visit:
        visit.wait_ready()
        adapters = ".panel:has(h2:text-is('Adapters'))"
        assert not visit.find(adapters).is_visible()
        names = "[name=model] option"
        visit.page.wait_for_selector(names, state="attached")
        assert visit.find(names).count() == 1
        assert fleet.post("/admin/adapters", {"name": "sql", "path": "a"}).status_code == 200
        visit.wait_for(f"{adapters} tbody tr", "sql")
        visit.page.wait_for_selector(f"{names}[value=sql]", state="attached")
        assert fleet.post("/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 200
        visit.page.wait_for_selector(f"{names}[value=sql]", state="detached")


def test_the_route_is_as_described(fleet: Server) -> None:
    """And every API server, one of which each connection goes to, shows all of them."""
    fleet.complete(max_tokens=5)

    def seen_by_all() -> bool:
        replies = [status_of(fleet)["api_servers"] for _ in range(4)]
        return all(len(rows) == 2 and sum(row["tokens"] for row in rows) >= 5 for rows in replies)

    wait_until(seen_by_all, 90, "the report of every API server")
    status = status_of(fleet)
    for body, name in (
        (status, "Status"),
        (status["engines"][1], "EngineStatus"),
        (status["api_servers"][1], "ApiServerStatus"),
    ):
        assert list(body) == REPLIES[name]["required"] == list(REPLIES[name]["properties"])


def status_of(fleet: Server) -> dict[str, Any]:
    found: dict[str, Any] = fleet.get("/status").json()
    return found


def test_what_the_server_says_of_its_start(browser: Browser, fleet: Server) -> None:
    """And that it is another one than before."""
    status = status_of(fleet)
    with Visit(browser, f"{fleet.url}/#status") as visit:
        visit.wait_ready()
        refusal = {"error": {"message": "not yet"}}
        visit.answer("/status", refusal, 503)
        visit.answer("/ready", {"ready": False, "phase": "loading weights", "progress": 0.42}, 503)
        visit.wait_for("#health-text", "loading weights 42 %")
        visit.wait_for("#status-note", "The server is starting: loading weights")
        later = copy.deepcopy(status)
        later["started"] += 100
        visit.answer("/status", later)
        visit.wait_for(".events", "The server has restarted")


def test_names_from_the_server_are_text(browser: Browser, fleet: Server) -> None:
    status = status_of(fleet)
    hostile = "<img src=x onerror=window.pwned=1>"
    status["models"] = [hostile]
    status["engines"][0]["host"] = hostile
    status["requests"][hostile] = 3
    with Visit(browser, f"{fleet.url}/#status") as visit:
        visit.answer("/status", status)
        visit.wait_for(".subject", hostile)
        visit.wait_for("td", hostile)
        assert visit.page.evaluate("window.pwned") is None
        assert visit.find("main img").count() == 0


def test_a_hidden_tab_does_not_ask(browser: Browser, fleet: Server) -> None:
    with Visit(browser, "about:blank") as visit:
        visit.page.clock.install()
        visit.url = f"{fleet.url}/#status"
        visit.page.goto(visit.url)
        visit.wait_ready()
        visit.page.clock.run_for(1000)
        with visit.page.expect_response("**/status") as reply:
            visit.page.clock.run_for(1500)
        reply.value.finished()
        visit.page.evaluate(SHOW, "hidden")
        asked = len(visit.asked)
        visit.page.clock.run_for(10_000)
        assert visit.asked[asked:] == []
        with visit.page.expect_response("**/status"):
            visit.page.evaluate(SHOW, "visible")
