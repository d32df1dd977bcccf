// Shows one message of the chat.

import { become, copyButton, make, setText } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { LiveMarkdown } from "./live_markdown.js";
import { smallPicture } from "./pictures.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result" };
const ENDS = {
  stopped: "Stopped.",
  interrupted: "The page was reloaded while this reply arrived: it is not complete.",
};

export class MessageView {
  /** `edited(text)`: what is done with another text of the user's message; without it there is none. */
  constructor(message, edited = null) {
    this.message = message;
    this.edited = edited;
    this.reasoning = make("details", { class: "reasoning", open: true }, make("summary", { text: "Reasoning" }), make("p", { class: "plain" }));
    const plain = message.role === "assistant" ? null : make("p", { class: "plain" });
    this.body = make("div", { class: "body" }, plain);
    this.formatted = plain ? null : new LiveMarkdown(this.body);
    this.calls = make("div", { class: "calls" });
    this.problem = make("p", { class: "problem", role: "alert" });
    this.stats = make("p", { class: "stats" });
    const head = make("div", { class: "who" }, make("h2", { text: WHO[message.role] }), 
      message.role === "user" && edited && make("button", { type: "button", class: "quiet copy edit", text: "Edit", onclick: () => this.edit() }),
      copyButton(() => message.text));
    this.node = make("article", { class: `message ${message.role}` }, head, this.reasoning, picturesOf(message), this.body, this.calls, this.problem, this.stats);
    this.shown = null;
    this.show();
  }

  /** Puts a form in the place of the text. */
  edit() {
    const field = make("textarea", { rows: 3, "aria-label": "Your message" });
    field.value = this.message.text;
    const end = () => {
      form.replaceWith(this.body);
      this.node.querySelector(".edit").focus();
    };
    const form = make("form", { class: "editor" }, field, make("div", { class: "actions" },
      make("button", { type: "button", class: "quiet", text: "Cancel", onclick: end }),
      make("button", { type: "submit", class: "primary", text: "Send again" })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.edited(field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceWith(form);
    field.focus();
  }

  /** Shows the message as it is; nothing is done if nothing came since the last time. */
  show() {
    const { message } = this;
    const calls = (message.calls ?? []).map((call) => call.arguments.length);
    const now = [message.state, message.text.length, message.reasoning?.length, ...calls].join();
    if (now === this.shown) return;
    this.shown = now;
    const streaming = message.state === "streaming";
    this.node.classList.toggle("streaming", streaming);
    this.node.setAttribute("aria-busy", String(streaming));
    this.reasoning.hidden = !message.reasoning;
    setText(this.reasoning.lastChild, message.reasoning ?? "");
    if (this.formatted) this.formatted.show(message.text);
    else setText(this.body.firstChild, message.text);
    become(this.calls, make("div", { class: "calls" }, ...(message.calls ?? []).map(callNode)));
    const problem = message.error || ENDS[message.state] || (isEmpty(message) ? "The reply is empty." : "");
    this.problem.hidden = !problem;
    this.problem.classList.toggle("error", message.state === "failed");
    setText(this.problem, problem);
    this.showStats();
  }

  showStats() {
    const { stats, finish } = this.message;
    const parts = [];
    if (stats?.ttft !== undefined) parts.push(`TTFT ${seconds(stats.ttft)}`);
    if (stats?.usage) {
      const { output, prompt } = stats.usage;
      if (output > 1 && stats.decode > 0) parts.push(`${rate((output - 1) / stats.decode)} tokens/s`);
      parts.push(`${count(output)} ${output === 1 ? "token" : "tokens"}`, `${count(prompt)} prompt tokens`);
    }
    if (stats?.total !== undefined) parts.push(seconds(stats.total));
    if (finish && finish !== "stop") parts.push(finish === "length" ? "cut at the maximum length" : finish.replace("_", " "));
    setText(this.stats, parts.join(" · "));
    this.stats.hidden = !parts.length;
  }
}

function picturesOf({ pictures }) {
  if (!pictures?.length) return null;
  return make("ul", { class: "pictures", "aria-label": "Images of the message" }, ...pictures.map((picture) => make("li", {},
    picture.url ? smallPicture(picture) : make("span", { class: "hint", text: `${picture.name}: too large to be kept` }))));
}

const isEmpty = ({ role, state, text, reasoning, calls }) => role === "assistant" && state === "done" && !text && !reasoning && !calls.length;

function callNode(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // not complete yet, or not JSON: as it is
  }
  const head = make("div", { class: "code-head" }, make("span", { text: `Tool call: ${call.name}` }));
  return make("div", { class: "code-block" }, head, make("pre", { tabindex: "0" }, make("code", { text: shown })));
}
