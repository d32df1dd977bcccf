// The form of one route: parameters, a body to edit, Send and Stop, the reply as it arrives, the same with curl.

import { copyButton, make, notify } from "./dom.js";
import { bytes, seconds } from "./format.js";
import { address, hasKey, pieces, send } from "./http.js";

/** Characters of a reply that are shown. */
const MAX_SHOWN = 500_000;

/** `route`: {path, method, operation, example, guarded}; `example` is null for a route without a body. */
export function requestForm(route) {
  const inputs = (route.operation.parameters ?? []).map((parameter) => ({
    parameter,
    input: make("input", { placeholder: parameter.schema?.default ?? "", required: parameter.required, name: parameter.name }),
  }));
  const body = route.example === null ? null
    : make("textarea", { class: "code", spellcheck: "false", "aria-label": "Body of the request" });
  if (body) {
    body.value = JSON.stringify(route.example, null, 2);
    body.rows = Math.min(20, body.value.split("\n").length + 1);
  }
  const streams = Boolean(route.operation.responses["200"]?.content?.["text/event-stream"]);
  const stream = streams ? make("input", { type: "checkbox" }) : null;
  const problem = make("p", { class: "field-error", role: "alert", hidden: true });
  const curl = make("pre", { tabindex: "0" });
  const sendButton = make("button", { type: "submit", class: "primary", text: "Send" });
  const stopButton = make("button", { type: "button", text: "Stop", hidden: true });
  const summary = make("p", { class: "reply-head", role: "status" });
  const output = make("pre", { class: "reply", tabindex: "0", hidden: true });
  const form = make("form", { class: "request", novalidate: true },
    ...inputs.map(({ parameter, input }) => make("label", { text: `${parameter.name} (${parameter.in})` }, input)),
    body && make("label", { text: "Body" }, body),
    problem,
    make("div", { class: "actions" }, stream && make("label", { class: "check" }, stream, "stream"), stopButton, sendButton),
    summary, output,
    make("details", {}, make("summary", { text: "curl" }), make("div", { class: "with-copy" }, curl, copyButton(() => curl.textContent))));

  const showCurl = () => { curl.textContent = curlOf(route, inputs, body?.value ?? null); };
  form.addEventListener("input", showCurl);
  stream?.addEventListener("change", () => {
    try {
      const value = JSON.parse(body.value);
      value.stream = stream.checked;
      body.value = JSON.stringify(value, null, 2);
      showCurl();
    } catch (error) {
      notify(problem, `Body: not JSON (${error.message})`);
    }
  });
  showCurl();

  let stopper = null;
  stopButton.addEventListener("click", () => stopper?.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    notify(problem, "");
    const missing = inputs.find(({ parameter, input }) => parameter.required && !input.value);
    if (stopper || missing) {
      if (missing) notify(problem, `${missing.parameter.name} is needed.`);
      return;
    }
    stopper = new AbortController();
    [sendButton.hidden, stopButton.hidden] = [true, false];
    try {
      await exchange(route, inputs, body, stopper.signal, summary, output);
    } catch (error) {
      summary.textContent = error.name === "AbortError" ? `${summary.textContent} · stopped` : error.message;
    }
    stopper = null;
    [sendButton.hidden, stopButton.hidden] = [false, true];
  });
  return form;
}

async function exchange(route, inputs, body, signal, summary, output) {
  const began = performance.now();
  summary.textContent = "Sent …";
  output.textContent = "";
  output.hidden = true;
  const headers = Object.fromEntries(given(inputs, "header").map(([name, value]) => [name, value]));
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: route.method.toUpperCase(), headers, body: body?.value, signal };
  const response = await send(pathOf(route, inputs), options);
  const head = `HTTP ${response.status} · ${response.headers.get("content-type") ?? "no content"}`;
  let size = 0;
  let text = "";
  output.hidden = false;
  for await (const piece of pieces(response)) {
    size += piece.length;
    if (text.length < MAX_SHOWN) {
      text += piece;
      output.append(piece);
    }
    summary.textContent = `${head} · ${bytes(size)} · ${seconds((performance.now() - began) / 1000)}`;
  }
  summary.textContent = `${head} · ${bytes(size)} · ${seconds((performance.now() - began) / 1000)}`;
  if (text.length < size) output.append("\n… the rest is not shown.");
  else if (head.includes("json")) output.textContent = indented(text);
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const given = (inputs, place) => inputs
  .filter(({ parameter, input }) => parameter.in === place && input.value)
  .map(({ parameter, input }) => [parameter.name, input.value]);

function pathOf(route, inputs) {
  const path = given(inputs, "path").reduce(
    (made, [name, value]) => made.replace(`{${name}}`, encodeURIComponent(value)), route.path);
  const query = new URLSearchParams(given(inputs, "query")).toString();
  return query ? `${path}?${query}` : path;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curlOf(route, inputs, body) {
  const parts = [`curl ${quoted(address(pathOf(route, inputs)))}`];
  if (route.method !== "get" && body === null) parts.push(`-X ${route.method.toUpperCase()}`);
  if (route.guarded || hasKey()) parts.push('-H "Authorization: Bearer $API_KEY"');
  for (const [name, value] of given(inputs, "header")) parts.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (body !== null) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(compact(body))}`);
  return parts.join(" \\\n  ");
}

function compact(text) {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text;
  }
}
