// The view of the fleet: figures, plots, engines, API servers, adapters, outcomes, events.

import { byId, make, notify, setText } from "./dom.js";
import { errorsOf, fleet, onFleet, rateAt } from "./fleet.js";
import { bytes, count, duration, percent, rate, timeOfDay } from "./format.js";
import { Plot } from "./plot.js";

/** Rows of a table that are shown. */
const MAX_ROWS = 256;

const plots = {
  tokens: new Plot("Generated tokens/s", [""], rate, { most: 10 }),
  prompt: new Plot("Prompt tokens/s", [""], rate, { most: 10 }),
  streams: new Plot("Streams", ["running", "waiting"], count, { most: 5 }),
  kv: new Plot("KV cache, fullest engine", [""], percent, { most: 1, fixed: true }),
};
const figures = new Map();
const parts = {};
let shownEvent = null;

export function startStatus() {
  const names = ["Engines ready", "Running", "Waiting", "Tokens/s", "Errors", "Restarts"];
  parts.model = make("h1", { text: "–" });
  parts.about = make("span", { class: "hint" });
  const list = make("dl", { class: "figures" }, ...names.map((name) => {
    const value = make("dd", { text: "–" });
    figures.set(name, value);
    return make("div", {}, make("dt", { text: name }), value);
  }));
  parts.engines = section("Engines");
  parts.servers = section("API servers");
  parts.adapters = section("Adapters");
  parts.requests = section("Requests since the start");
  parts.events = section("Seen by this page");
  byId("status-body").replaceChildren(
    make("div", { class: "subject" }, parts.model, parts.about),
    list,
    make("div", { class: "plots" }, ...Object.values(plots).map((plot) => plot.node)),
    parts.engines, parts.servers, parts.adapters,
    make("div", { class: "columns" }, parts.requests, parts.events),
  );
  onFleet(show);
}

const section = (title) => make("section", { class: "panel", "data-title": title }, make("h2", { text: title }),
  make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title }));

function show() {
  const { state, text, status } = fleet;
  const gone = !["ready", "degraded"].includes(state);
  notify(byId("status-note"), gone && state !== "connecting" ? noteOf(state, text) : "");
  byId("status-body").classList.toggle("stale", gone);
  if (state === "key") forgetAll();
  else if (status) showStatus(status);
  showEvents();
}

function noteOf(state, text) {
  if (state === "key") return `${text[0].toUpperCase()}${text.slice(1)}: the button above takes it.`;
  return state === "loading" ? `The server is starting: ${text}` : `${text[0].toUpperCase()}${text.slice(1)}. Trying again every second.`;
}

/** A page without a valid key shows nothing that it saw with one. */
function forgetAll() {
  fleet.status = null;
  fleet.readings = [];
  for (const value of [...figures.values(), parts.model]) setText(value, "–");
  setText(parts.about, "");
  for (const plot of Object.values(plots)) plot.show([]);
  for (const part of [parts.engines, parts.servers, parts.adapters, parts.requests]) part.lastChild.replaceChildren();
}

function showStatus(status) {
  const { readings } = fleet;
  const last = readings.length - 1;
  const ready = status.engines.filter((engine) => engine.state === "ready").length;
  const tokensRate = rateAt(last, (reading) => reading.tokens);
  const shown = {
    "Engines ready": `${ready} of ${status.engines.length}`,
    Running: count(readings[last].running),
    Waiting: count(readings[last].waiting),
    "Tokens/s": rate(tokensRate),
    Errors: count(errorsOf(status)),
    Restarts: count(status.restarts),
  };
  for (const [name, value] of Object.entries(shown)) setText(figures.get(name), value);
  const up = status.started === null ? "" : `, up for ${duration(status.time - status.started)}`;
  setText(parts.model, status.models.join(", "));
  setText(parts.about, `Penstock ${status.version}${up}`);
  figures.get("Engines ready").classList.toggle("bad", ready < status.engines.length);
  showPlots(readings);
  showEngines(status, last);
  showServers(status, last);
  showAdapters(status);
  showRequests(status);
}

function showPlots(readings) {
  const over = (...values) => readings.map((reading, index) => ({ time: reading.time, values: values.map((value) => value(reading, index)) }));
  plots.tokens.show(over((_, index) => rateAt(index, (reading) => reading.tokens)));
  plots.prompt.show(over((_, index) => rateAt(index, (reading) => reading.prompt)));
  plots.streams.show(over((reading) => reading.running, (reading) => reading.waiting));
  plots.kv.show(over((reading) => reading.kv));
}

function showEngines(status, last) {
  const rows = status.engines.map((engine) => [
    engine.engine,
    make("span", { class: `state ${engine.state}`, text: engine.state }),
    engine.host ?? "–",
    count(engine.running),
    count(engine.waiting),
    meter(engine.kv_used),
    rate(rateAt(last, (reading) => reading.engines.get(engine.engine))),
    count(engine.tokens),
    engine.prefix_cache_queries ? percent(engine.prefix_cache_hits / engine.prefix_cache_queries) : "–",
    count(engine.preemptions),
    count(engine.restarts),
    engine.started === null || engine.state === "down" ? "–" : duration(status.time - engine.started),
  ]);
  table(parts.engines, ["Engine", "State", "Host", "Running", "Waiting", "KV cache", "Tokens/s", "Tokens", "Prefix hits", "Preempted", "Restarts", "Up for"], rows);
}

function showServers(status, last) {
  const rows = status.api_servers.map((server) => [
    server.server,
    count(server.connections),
    count(server.streams),
    bytes(server.bytes_queued),
    rate(rateAt(last, (reading) => reading.servers.get(server.server))),
    count(server.tokens),
    count(server.restarts),
    server.started === null ? "–" : duration(status.time - server.started),
  ]);
  table(parts.servers, ["API server", "Connections", "Streams", "Unread", "Tokens/s", "Tokens", "Restarts", "Up for"], rows);
}

function showAdapters(status) {
  const rows = status.adapters.map((adapter) => [
    adapter.name,
    count(adapter.rank),
    adapter.path,
    adapter.engines.join(", ") || "none",
    Object.entries(adapter.missing).map(([engine, reason]) => `${engine}: ${reason}`).join("; ") || "–",
  ]);
  parts.adapters.hidden = !rows.length;
  table(parts.adapters, ["Adapter", "Rank", "Path", "Engines", "Missing"], rows);
}

const OUTCOMES = {
  stop: "complete", length: "cut at the maximum length", abort: "stopped by the client", cut: "not read by the client", error: "failed",
};

function showRequests(status) {
  const rows = [
    ...Object.entries(status.requests).map(([outcome, times]) => [OUTCOMES[outcome] ?? outcome, count(times)]),
    ...Object.entries(status.rejected).map(([code, times]) => [`refused with HTTP ${code}`, count(times)]),
    ...Object.entries(status.interrupted).filter(([, times]) => times).map(([outcome, times]) => [`lost its engine, then ${outcome.replace("_", " ")}`, count(times)]),
  ];
  table(parts.requests, ["Outcome", "Requests"], rows);
}

function showEvents() {
  const [latest] = fleet.events;
  if (latest === shownEvent) return;
  shownEvent = latest;
  const list = fleet.events.map((event) => make("li", { class: event.kind }, make("time", { text: timeOfDay(event.time) }), ` ${event.text}`));
  parts.events.lastChild.replaceChildren(list.length ? make("ul", { class: "events" }, ...list) : make("p", { class: "hint", text: "No engine came or went." }));
}

function meter(share) {
  const bar = make("meter", { min: 0, max: 1, high: 0.9, value: share, "aria-label": "KV cache in use" });
  return make("span", { class: "kv" }, bar, make("span", { text: percent(share) }));
}

/** Fills a table; cells keep their elements, so that a selection survives. */
function table(part, heads, rows) {
  const box = part.lastChild;
  if (!box.firstChild || box.firstChild.tagName !== "TABLE") {
    const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col", text })));
    box.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody")));
  }
  const body = box.firstChild.tBodies[0];
  const shown = rows.slice(0, MAX_ROWS);
  while (body.rows.length > shown.length) body.deleteRow(-1);
  while (body.rows.length < shown.length) body.append(make("tr", {}, ...heads.map(() => make("td"))));
  shown.forEach((row, index) => row.forEach((value, column) => {
    const cell = body.rows[index].cells[column];
    if (typeof value === "string") setText(cell, value);
    else if (!cell.firstChild?.isEqualNode?.(value)) cell.replaceChildren(value);
  }));
  const more = rows.length > MAX_ROWS ? ` (the first ${MAX_ROWS} of ${rows.length})` : "";
  setText(part.firstChild, part.dataset.title + more);
}
