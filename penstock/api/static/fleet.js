// Reads /status once a second while the page can be seen, and keeps the last readings for the plots.

import { getJson, hasKey, onKey, send } from "./http.js";

const INTERVAL_MS = 1000;
const MAX_READINGS = 180;
/** Seconds over which a rate is averaged: processes report up to a second late. */
const RATE_S = 3;

/** What is known of the server. `state`: connecting, ready, loading, key, down. */
export const fleet = { state: "connecting", text: "connecting", status: null, readings: [], events: [] };

const listeners = new Set();
const known = new Map();
let timer = null;
/** Grows when the key or the visibility changes: an earlier reading that is under way is not shown. */
let turn = 0;

/** Calls a function after each reading. */
export const onFleet = (listener) => listeners.add(listener);

export function startFleet() {
  document.addEventListener("visibilitychange", restart);
  onKey(restart);
  restart();
}

function restart() {
  clearTimeout(timer);
  turn += 1;
  if (document.visibilityState === "visible") tick(turn);
}

async function tick(mine) {
  const found = await read(mine);
  if (mine !== turn) return;
  Object.assign(fleet, found);
  for (const listener of listeners) listener(fleet);
  timer = setTimeout(() => tick(mine), INTERVAL_MS);
}

async function read(mine) {
  try {
    const status = await getJson("/status", { signal: AbortSignal.timeout(10_000) });
    remember(status);
    const up = status.engines.filter((engine) => engine.state === "ready").length;
    const all = status.engines.length;
    if (up === all) return { state: "ready", text: "ready", status };
    if (!up) return { state: "down", text: status.engines.some((one) => one.state === "asleep") ? "asleep" : "no engine is ready", status };
    return { state: "degraded", text: `${up} of ${all} engines ready`, status };
  } catch (error) {
    if (mine !== turn) return {};
    if (error.status === 401) {
      return { state: "key", text: hasKey() ? "the key is not valid" : "an access key is needed" };
    }
    return starting();
  }
}

/** Of a server that has no status yet: what it says of its start. */
async function starting() {
  note("server", "away", "The server does not answer");
  try {
    const response = await send("/ready", { signal: AbortSignal.timeout(5_000) });
    const body = await response.json().catch(() => ({}));
    if (response.ok) return { state: "connecting", text: "connecting" };
    const share = typeof body.progress === "number" ? ` ${Math.round(100 * body.progress)} %` : "";
    const phase = body.phase ?? body.error?.message ?? "not ready";
    return { state: "loading", text: `${String(phase).slice(0, 80)}${share}` };
  } catch {
    return { state: "down", text: "the server cannot be reached" };
  }
}

// -- readings

function remember(status) {
  const last = fleet.readings.at(-1);
  if (last && status.started !== last.started) {
    if (last.started !== null && status.started !== null) addEvent("The server has restarted", "bad");
    fleet.readings = [];
  }
  note("server", "here", "The server answers again");
  for (const engine of status.engines) {
    note(`engine ${engine.engine}`, engine.state, `Engine ${engine.engine} is ${engine.state}`);
    noteRestarts(`Engine ${engine.engine}`, engine.restarts);
  }
  for (const server of status.api_servers) noteRestarts(`API server ${server.server}`, server.restarts);
  const sum = (rows, column) => rows.reduce((total, row) => total + row[column], 0);
  fleet.readings.push({
    time: status.time,
    started: status.started,
    tokens: sum(status.engines, "tokens"),
    prompt: sum(status.engines, "prompt_tokens"),
    running: sum(status.engines, "running"),
    waiting: sum(status.engines, "waiting"),
    kv: Math.max(0, ...status.engines.map((engine) => engine.kv_used)),
    errors: errorsOf(status),
    engines: new Map(status.engines.map((engine) => [engine.engine, engine.tokens])),
    servers: new Map(status.api_servers.map((server) => [server.server, server.tokens])),
  });
  if (fleet.readings.length > MAX_READINGS) fleet.readings.shift();
}

/** Requests that the server failed: refused with a status of 500 and above, or ended by an error. */
export function errorsOf(status) {
  const refused = Object.entries(status.rejected).filter(([code]) => code >= 500);
  return refused.reduce((total, [, times]) => total + times, status.requests.error ?? 0);
}

/** A rate per second at a reading, by a function of a reading; null without an earlier one. */
export function rateAt(index, value) {
  const last = fleet.readings[index];
  let first = index;
  while (first > 0 && last.time - fleet.readings[first].time < RATE_S) first -= 1;
  const earlier = fleet.readings[first];
  const elapsed = last.time - earlier.time;
  return elapsed > 0 ? Math.max(0, (value(last) ?? 0) - (value(earlier) ?? 0)) / elapsed : null;
}

// -- what happened while the page looked

function note(name, state, text) {
  const before = known.get(name);
  known.set(name, state);
  if (before !== undefined && before !== state) addEvent(text, state === "ready" || state === "here" ? "good" : "bad");
}

/** A process may be back before the next reading. */
function noteRestarts(name, restarts) {
  const key = `restarts ${name}`;
  if (restarts > (known.get(key) ?? restarts)) addEvent(`${name} has restarted`, "bad");
  known.set(key, restarts);
}

function addEvent(text, kind) {
  fleet.events.unshift({ time: new Date(), text, kind });
  fleet.events.length = Math.min(fleet.events.length, 50);
}
