// The list of conversations: opens, renames, deletes, exports and imports them.

import { byId, download, make, notify } from "./dom.js";
import { keptList, onHistory, rename, shortTitle } from "./history.js";

/** A file may be read whole: it has to fit into the browser's storage. */
const MAX_FILE = 8_000_000;

/**
 * `actions`: `current()` is the open conversation, `open(id)` opens one, null a new one; `remove(id)` deletes one;
 * `exported(id, title)` is one as {md, json}; `import(text)` opens one from a file, and throws an Error that says what is
 * wrong with it.
 */
export class HistoryView {
  constructor(actions) {
    this.actions = actions;
    this.list = byId("conversations");
    /** The conversation whose title is being edited. */
    this.renamed = null;
    /** The one, beside the open one, whose buttons are shown. */
    this.unfolded = null;
    byId("history-new").addEventListener("click", () => actions.open(null));
    byId("history-import").addEventListener("click", () => byId("history-file").click());
    byId("history-file").addEventListener("change", (event) => this.read(event.target));
    onHistory(() => this.show());
  }

  show() {
    if (this.renamed !== null && this.list.querySelector("input")) return; // it keeps what is typed; its end shows the list
    const { id: current, title, messages } = this.actions.current();
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    const kept = keptList();
    if (messages.length && !kept.some(({ id }) => id === current)) kept.unshift({ id: current, title }); // to be exported
    this.list.replaceChildren(...kept.map((each) => this.entry(each, each.id === current)));
    byId("history-count").textContent = kept.length ? ` (${kept.length})` : "";
    byId("history-empty").hidden = kept.length > 0;
    if (focused) [...this.list.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === focused)?.focus();
  }

  entry({ id, title }, current) {
    if (this.renamed === id) return make("li", {}, this.renaming(id, title));
    const button = (text, action) => make("button", { type: "button", class: "quiet", text, "data-focus": `${id} ${text}`, "aria-label": `${text}: ${title}`, onclick: action });
    const open = make("button", { type: "button", class: "quiet title", text: title, title, "aria-current": current ? "true" : null, "data-focus": id, onclick: () => this.actions.open(id) });
    const more = make("button", { type: "button", class: "quiet more", text: "⋯", title: "More", "data-focus": `${id} more`, "aria-label": `More: ${title}`, "aria-expanded": String(this.unfolded === id), onclick: () => this.unfold(id) });
    if (!current && this.unfolded !== id) return make("li", {}, open, more);
    const exported = (kind, type) => () => download(`${shortTitle(title).replace(/[^\p{L}\p{N} _-]/gu, "") || "conversation"}.${kind}`, type, this.actions.exported(id, title)[kind]);
    return make("li", {}, open, !current && more, make("div", { class: "entry-actions" },
      button("Rename", () => this.edit(id)),
      button("Delete", () => {
        this.unfolded = null;
        this.actions.remove(id);
      }),
      button("Markdown", exported("md", "text/markdown")),
      button("JSON", exported("json", "application/json"))));
  }

  unfold(id) {
    this.unfolded = this.unfolded === id ? null : id;
    this.show();
  }

  edit(id) {
    this.renamed = id;
    this.show();
    this.list.querySelector("input")?.select();
  }

  renaming(id, title) {
    const input = make("input", { value: title, maxlength: 80, "aria-label": "Title of the conversation" });
    const end = (text) => {
      if (this.renamed !== id) return;
      this.renamed = null;
      if (text) rename(id, text);
      else this.show();
      [...this.list.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === id)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (!["Enter", "Escape"].includes(event.key) || event.isComposing) return;
      event.preventDefault();
      end(event.key === "Enter" ? shortTitle(input.value) : "");
    });
    input.addEventListener("blur", () => end(shortTitle(input.value)));
    return input;
  }

  async read(field) {
    const [file] = field.files;
    field.value = "";
    if (!file) return;
    try {
      if (file.size > MAX_FILE) throw new Error(`it has more than ${MAX_FILE / 1_000_000} MB`);
      this.actions.import(await file.text());
    } catch (error) {
      notify(byId("history-note"), `${file.name} is no exported conversation: ${error.message}.`);
    }
  }
}
