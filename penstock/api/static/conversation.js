// The messages of a chat as data: kept by the browser, turned into requests, filled from events.

import { keep, keptList, keptMessages, newId, shortTitle } from "./history.js";
import { load, save } from "./session.js";

/** Tool calls of a reply, whose numbers are the server's. */
const MAX_CALLS = 128;

/** Characters of pictures that are kept with a conversation: the browser's storage has room for about four million. */
const MAX_PICTURES = 1_000_000;

/**
 * A message. A user's may have `pictures`, {name, url} of each; without a url it was not kept. `role`: user, assistant or tool. An assistant's has `state` (streaming, done, stopped, interrupted,
 * failed), `reasoning`, `calls` (tool calls), `error`, `stats` and `finish`; a tool's has `callId`.
 */
export class Conversation {
  /** A new one, or one that is kept. */
  constructor(id = null, messages = keptMessages(id), title = keptList().find((each) => each.id === id)?.title ?? "") {
    this.id = id ?? newId();
    this.title = title;
    this.messages = Array.isArray(messages) ? messages.filter((message) => typeof message?.text === "string") : [];
    /** A deleted one is not kept, whatever is added to it. */
    this.deleted = false;
    for (const message of this.messages) {
      if (message.state === "streaming") message.state = "interrupted";
      if (message.pictures) message.pictures = Array.isArray(message.pictures) ? message.pictures.filter(isPicture) : [];
      if (message.role === "assistant") message.calls = Array.isArray(message.calls) ? message.calls.filter(isCall) : [];
    }
  }

  /** The one that was open before a reload of this tab. */
  static reopened() {
    return new Conversation(load("conversation", null));
  }

  /** Makes it the one that a reload of this tab opens. */
  open() {
    save("conversation", this.id);
  }

  /** Keeps it, once it has messages. Returns whether there was room, and how many others were dropped. */
  save() {
    if (!this.messages.length || this.deleted) return { kept: true, dropped: 0 };
    this.title ||= shortTitle(this.messages[0].text) || "Conversation";
    return keep({ id: this.id, title: this.title, messages: this.forStorage() });
  }

  /** The messages, without their pictures if these are too large. */
  forStorage() {
    const pictures = this.messages.flatMap((message) => message.pictures ?? []);
    if (pictures.reduce((sum, { url }) => sum + url.length, 0) <= MAX_PICTURES) return this.messages;
    return this.messages.map((message) => (
      message.pictures ? { ...message, pictures: message.pictures.map(({ name }) => ({ name, url: "" })) } : message));
  }

  /** Removes a message and all behind it. */
  cut(message) {
    this.messages.length = this.messages.indexOf(message);
  }

  add(message) {
    this.messages.push(message);
    return message;
  }

  addReply() {
    return this.add({ role: "assistant", text: "", reasoning: "", calls: [], state: "streaming", error: "", stats: {}, finish: null });
  }

  /** Removes the last reply, so that it can be made again. */
  dropReply() {
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
  }

  /** The calls of the last reply, if they wait for their results. */
  openCalls() {
    const last = this.messages.at(-1);
    return last?.role === "assistant" && last.state === "done" ? last.calls : [];
  }

  /** All messages as the chat API has them, and the reasoning of replies. */
  forFile(system) {
    const told = this.messages.map((message) => ({ ...messageOf({ calls: [], ...message }), ...(message.reasoning && { reasoning: message.reasoning }) }));
    return [...(system ? [{ role: "system", content: system }] : []), ...told];
  }

  /** The `messages` of a request. A reply without text is left out: it failed. */
  forChat(system) {
    const sent = this.messages.filter((message) => message.role !== "assistant" || message.text || message.calls.length);
    return [...(system ? [{ role: "system", content: system }] : []), ...sent.map(messageOf)];
  }

  /** The `prompt` of a request to a model without a chat template: all texts, one after the other. */
  forCompletion(system) {
    return system + this.messages.map((message) => message.text).join("");
  }
}

function messageOf(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  if (message.role === "user") return { role: "user", content: contentOf(message) };
  if (!message.calls.length) return { role: "assistant", content: message.text };
  const calls = message.calls.map((call) => ({
    id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
  }));
  return { role: "assistant", content: message.text || null, tool_calls: calls };
}

function contentOf({ text, pictures = [] }) {
  const shown = pictures.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return shown.length ? [...shown, ...(text ? [{ type: "text", text }] : [])] : text;
}

const isPicture = (picture) => [picture?.name, picture?.url].every((each) => typeof each === "string");

/** Adds an event of either API to a reply. Returns whether it had text, reasoning or a call. */
export function addEvent(reply, event) {
  if (event.usage) reply.stats.usage = { prompt: event.usage.prompt_tokens, output: event.usage.completion_tokens };
  const choice = event.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) reply.finish = choice.finish_reason;
  const delta = choice.delta ?? {};
  const text = choice.text ?? delta.content ?? "";
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  reply.text += text;
  reply.reasoning += reasoning;
  for (const part of delta.tool_calls ?? []) addCall(reply.calls, part);
  return Boolean(text || reasoning || delta.tool_calls?.length);
}

const isCall = (call) => [call?.id, call?.name, call?.arguments].every((each) => typeof each === "string");

/** Adds a part of a call to those of a reply. Throws an Error for one too many. */
function addCall(calls, part) {
  let call = calls.find(({ index }) => index === part.index);
  if (!call) {
    if (calls.length === MAX_CALLS) throw new Error(`The reply has more than ${MAX_CALLS} tool calls.`);
    calls.push(call = { index: part.index, id: "", name: "", arguments: "" });
  }
  call.id = part.id ?? call.id;
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}
