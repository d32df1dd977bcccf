// The dialog for the access key.

import { byId, notify } from "./dom.js";
import { hasKey, onKey, setKey } from "./http.js";

const dialog = byId("key-dialog");
const input = byId("key-input");

/** Opens the dialog; `problem` says why. */
export function askForKey(problem = "") {
  notify(byId("key-error"), problem);
  if (!dialog.open) {
    input.value = "";
    dialog.showModal();
  }
}

export function startKey() {
  const show = () => { byId("key-button").textContent = hasKey() ? "Access key set" : "Access key"; };
  onKey(show);
  show();
  byId("key-button").addEventListener("click", () => askForKey());
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => {
    dialog.close();
    setKey("");
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) {
      notify(byId("key-error"), "A key consists of printable ASCII characters without spaces.");
      return;
    }
    dialog.close();
    setKey(key);
  });
}
