// The chat: sends the conversation, shows the reply as it streams, stops it.

import { Conversation, addEvent } from "./conversation.js";
import { byId, make, notify, setChildren } from "./dom.js";
import { asJson, asMarkdown, fromJson } from "./exports.js";
import { fleet, onFleet } from "./fleet.js";
import { forget, onKept } from "./history.js";
import { HistoryView } from "./history_view.js";
import { errorOf, events, jsonBody, onKey, send } from "./http.js";
import { askForKey } from "./key.js";
import { MessageView } from "./message_view.js";
import { offerPictures, startPictures, takePictures } from "./pictures.js";
import { listModels, offerThinking, requestFields, setSystem, settingsError, startSettings, system } from "./settings.js";
import { toolResults } from "./tool_results.js";

const SAVE_MS = 500;
/** A reply that takes long to show is shown less often: this many times as long it waits for the next time. */
const PAINT_PAUSES = 4;
const NO_TEMPLATE =
  "This model has no chat template: it continues your text (/v1/completions) and knows no roles. Break lines as the text needs it.";
const NO_TEXT =
  "This model makes vectors, scores or labels and no text: there is no chat with it. API shows how to ask for them, /v1/embeddings for instance.";
const NOT_KEPT = "The browser's storage has no room for this conversation, or is switched off: it ends with this tab. Export it to keep it.";
const NO_ROOM = "The browser's storage for conversations was full: the oldest were dropped";

const log = byId("log");
const prompt = byId("prompt");
let conversation = Conversation.reopened();
/** The views of its messages. */
const views = new WeakMap();
let running = null;
let history = null;
/** The models and adapters of the latest list, null: none was read. */
let models = null;
/** Whether the model makes text. */
let makesText = true;
/** Whether the page is going away: the browser then breaks its requests off, which is no fault of theirs. */
let leaving = false;
/** Whether the log follows the reply: until its reader scrolls up. */
let following = true;

export function startChat() {
  startSettings();
  startPictures();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => open(null));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || byId("chat").hidden || document.querySelector("dialog[open]")) return;
    running?.abort();
  });
  log.addEventListener("scroll", () => {
    following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  });
  addEventListener("pagehide", () => {
    if (running) conversation.save();
    leaving = true;
  });
  addEventListener("pageshow", () => { leaving = false; }); // it was kept by the browser
  onKey(() => { models = null; });
  onFleet(refresh);
  onKept(follow);
  history = new HistoryView({
    current: () => conversation,
    open,
    exported: (id, title) => {
      const messages = (id === conversation.id ? conversation : new Conversation(id)).forFile(system());
      return { md: asMarkdown(title, messages), json: asJson(title, messages) };
    },
    remove,
    import: imported,
  });
  conversation.open();
  history.show();
  showAll();
}

/** After a reading: the models, if others are served, and whether the model can chat. */
async function refresh() {
  const { status, state } = fleet;
  showNote();
  if (status) offerThinking(status.thinking ?? []);
  if (!status || state === "key") return;
  const served = JSON.stringify([status.models, status.adapters.map((adapter) => adapter.name)]);
  if (models === served) return;
  models = served;
  try {
    const can = await listModels();
    makesText = can.text;
    offerPictures(can.text && can.images && status.chat !== false);
  } catch {
    models = null; // the next reading tries again
    return;
  }
  prompt.disabled = byId("send").disabled = !makesText;
  showNote();
  if (!conversation.messages.length) showAll(); // the greeting
}

function showNote() {
  const template = fleet.status?.chat === false ? NO_TEMPLATE : "";
  notify(byId("chat-note"), makesText ? template : NO_TEXT);
}

async function submit() {
  if (running) return;
  const pictures = await takePictures();
  const text = prompt.value;
  if (running || !(text.trim() || pictures.length)) return;
  conversation.add({ role: "user", text, ...(pictures.length && { pictures }) });
  prompt.value = "";
  reply();
}

/** Opens a conversation that is kept, or a new one. A reply that streams is stopped. */
function open(id, messages = undefined, title = undefined) {
  running?.abort();
  running = null;
  conversation = new Conversation(id, messages, title);
  conversation.open();
  notify(byId("history-note"), "");
  following = true;
  showAll();
  history.show();
  prompt.focus();
}

/** Shows what another tab added to the open conversation, once that is complete: the next message is to follow it. */
function follow(id) {
  if (id !== conversation.id || running || conversation.deleted || log.querySelector(".editor")) return;
  const told = new Conversation(id);
  if (told.messages.at(-1)?.state === "interrupted") return;
  conversation = told;
  showAll();
}

/** Deletes a conversation, and offers to take that back. */
function remove(id) {
  const mine = id === conversation.id ? conversation : new Conversation(id);
  const opened = mine === conversation;
  mine.deleted = true; // a reply that streams is not kept
  forget(id);
  if (opened) open(null);
  else history.show();
  const undo = make("button", { type: "button", class: "quiet", text: "Undo" });
  undo.addEventListener("click", () => {
    mine.deleted = false;
    kept(mine);
    notify(byId("history-note"), "");
    if (opened && !running) open(id);
    else prompt.focus();
  });
  notify(byId("history-note"), `Deleted: ${mine.title} `);
  byId("history-note").append(undo);
  undo.focus();
}

/** Opens what was exported as a conversation of its own. */
function imported(text) {
  const { title, system: instructions, messages } = fromJson(text);
  open(null, messages, title);
  setSystem(instructions);
  kept();
}

/** Keeps the conversation, and says what became of it. */
function kept(mine = conversation) {
  const { kept: room, dropped } = mine.save();
  if (!room) {
    notify(byId("history-note"), NOT_KEPT);
    history.show();
  }
  else if (dropped) notify(byId("history-note"), `${NO_ROOM} (${dropped}).`);
}

/** Asks again from a message on, with another text. What was behind it is replaced. */
function resend(message, text) {
  running?.abort();
  conversation.cut(message);
  conversation.add({ ...message, text });
  reply();
}

/** Asks for a reply to the conversation as it is. */
async function reply() {
  const chat = fleet.status?.chat !== false;
  let request;
  try {
    request = requestOf(chat);
  } catch (error) {
    settingsError(error.message);
    showAll();
    return;
  }
  const mine = conversation;
  const message = mine.addReply();
  const stopper = new AbortController();
  running = stopper;
  following = true;
  const view = showAll();
  const end = paintWhile(view, mine);
  try {
    await receive(message, chat ? "/v1/chat/completions" : "/v1/completions", request, stopper.signal);
    message.state = "done";
  } catch (error) {
    if (leaving) return;
    fail(message, error);
  }
  end();
  kept(mine);
  if (running === stopper) running = null;
  if (mine === conversation) showAll();
}

function requestOf(chat) {
  const body = { ...requestFields(chat), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (chat) body.messages = conversation.forChat(system());
  else body.prompt = conversation.forCompletion(system());
  return body;
}

async function receive(message, path, body, signal) {
  const began = performance.now();
  const since = (from) => (performance.now() - from) / 1000;
  let first = null;
  try {
    const response = await send(path, jsonBody(body, signal));
    if (!response.ok) throw await errorOf(response);
    for await (const event of events(response)) {
      if (!addEvent(message, event)) continue;
      if (first === null) {
        first = performance.now();
        message.stats.ttft = (first - began) / 1000;
      }
      message.stats.decode = since(first);
    }
  } finally {
    message.stats.total = since(began);
  }
}

function fail(message, error) {
  if (error.name === "AbortError") {
    message.state = "stopped";
    return;
  }
  message.state = "failed";
  message.error = error.status ? `HTTP ${error.status}: ${error.message}` : error.message;
  if (error.status === 401) askForKey(error.message);
}

/** Paints a reply while it streams: at most once per frame, and keeps it over a reload. Returns what ends it. */
function paintWhile(view, mine) {
  let frame = 0;
  let next = 0;
  const paint = () => {
    const began = performance.now();
    if (began >= next) {
      view.show();
      if (following) log.scrollTop = log.scrollHeight;
      next = began + (1 + PAINT_PAUSES) * (performance.now() - began);
    }
    frame = requestAnimationFrame(paint);
  };
  paint();
  const saving = setInterval(() => kept(mine), SAVE_MS);
  return () => {
    cancelAnimationFrame(frame);
    clearInterval(saving);
  };
}

// -- what is shown

/** Shows the conversation; returns the view of the last message. Messages that are shown stay as they are. */
function showAll() {
  const shown = conversation.messages.map(viewOf);
  const last = conversation.messages.at(-1);
  for (const view of shown) view.show();
  setChildren(log, [...shown.map((view) => view.node), ...(last ? (running ? [] : further(last)) : [greeting()])]);
  byId("stop").hidden = running === null;
  byId("send").hidden = running !== null;
  log.classList.toggle("busy", running !== null);
  if (following) log.scrollTop = log.scrollHeight;
  return shown.at(-1);
}

function viewOf(message) {
  if (!views.has(message)) views.set(message, new MessageView(message, (text) => resend(message, text)));
  return views.get(message);
}

const greeting = () => make("p", { class: "greeting", text: makesText ? "Ask the model something." : "" });

/** What can be done about the last message. */
function further(last) {
  const again = make("button", { type: "button", class: "quiet", text: last.role === "assistant" && last.state === "done" ? "Regenerate" : "Try again" });
  again.addEventListener("click", () => {
    conversation.dropReply();
    reply();
  });
  const calls = conversation.openCalls();
  return [...(calls.length ? [toolResults(calls, answerCalls)] : []), make("div", { class: "after" }, again)];
}

function answerCalls(results) {
  for (const { id, text } of results) conversation.add({ role: "tool", callId: id, text });
  reply();
}
