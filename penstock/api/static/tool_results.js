// A form for the results of tool calls: this page runs no tools, its user does.

import { make } from "./dom.js";

/** `answer(results)` gets one {id, text} for each call. */
export function toolResults(calls, answer) {
  const fields = calls.map((call) => make("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "The tool's result" }));
  const rows = calls.map((call, index) => make("label", { text: `Result of ${call.name}` }, fields[index]));
  const form = make("form", { class: "tool-results" }, ...rows, make("button", { type: "submit", text: "Send results" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer(calls.map((call, index) => ({ id: call.id, text: fields[index].value })));
  });
  return form;
}
