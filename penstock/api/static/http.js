// Requests to the server that sent this page. Addresses are relative: a proxy may serve it below a prefix.

import { forget, load, save } from "./session.js";

const listeners = new Set();
let key = load("key", "");

/** An error reply of the server, or one without a status of its own (0): in a stream, or because there was no reply. */
export class ServerError extends Error {
  constructor(status, message, details = {}) {
    super(message);
    this.status = status;
    this.details = details;
  }
}

export const hasKey = () => key !== "";

/** Uses a key from here on; an empty one is forgotten. */
export function setKey(value) {
  key = value;
  if (value) save("key", value);
  else forget("key");
  for (const listener of listeners) listener();
}

export const onKey = (listener) => listeners.add(listener);

/** The absolute address of a path of the API, such as /v1/models. */
export const address = (path) => new URL(path.replace(/^\//, ""), new URL(".", document.baseURI)).href;

/** The reply to a request, whatever its status. Throws ServerError if there is none, AbortError if stopped. */
export async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(address(path), { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server cannot be reached.");
  }
}

/** The JSON of a reply. Throws ServerError for a status that is none of success. */
export async function getJson(path, options) {
  const response = await send(path, options);
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

/** The body of a POST. */
export const jsonBody = (value, signal) => ({
  method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(value),
});

export async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let details = {};
  try {
    details = JSON.parse(text);
  } catch {
    // a proxy's page, or nothing
  }
  const message = details?.error?.message ?? (text.slice(0, 500) || "The reply has no text.");
  return new ServerError(response.status, String(message), details ?? {});
}

const textOf = (error) => (typeof error === "string" ? error : String(error.message ?? JSON.stringify(error)));

/**
 * The data of each event of a streamed reply, before [DONE]. Throws ServerError if the stream ends earlier, or with
 * an event of an error.
 */
export async function* events(response) {
  let waiting = "";
  for await (const piece of pieces(response)) {
    waiting += piece;
    const whole = waiting.split("\n\n");
    waiting = whole.pop();
    for (const event of whole) {
      const data = dataOf(event);
      if (data === "[DONE]") return;
      if (data === null) continue;
      const value = JSON.parse(data);
      if (value.error) throw new ServerError(0, textOf(value.error), value);
      yield value;
    }
  }
  throw new ServerError(0, "The connection broke before the reply was complete.");
}

/** The texts of a reply as they arrive. */
export async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The connection broke before the reply was complete.");
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).trimStart()).join("\n") : null;
}
