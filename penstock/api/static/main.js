// The page: three views below one bar.

import { startChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { fleet, onFleet, startFleet } from "./fleet.js";
import { hasKey, onKey } from "./http.js";
import { askForKey, startKey } from "./key.js";
import { startReference } from "./reference.js";
import { startStatus } from "./status.js";

const VIEWS = ["chat", "status", "api"];
/** What is shown without a fragment: /docs is the address of the reference. */
const FIRST = /\/docs\/?$/.test(location.pathname) ? "api" : "chat";

let shown = FIRST;

function showView() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : wanted === "main" ? shown : FIRST; // the link that skips the bar
  shown = view;
  for (const name of VIEWS) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** Whether the dialog was shown for the key that is in use, or for none. */
let asked = false;

function showHealth() {
  byId("health").dataset.state = fleet.state;
  setText(byId("health-text"), fleet.text);
  const model = fleet.status?.models[0];
  document.title = model ? `${model} – Penstock` : "Penstock";
  if (fleet.state === "key" && !asked) askForKey(hasKey() ? "The server does not take this key." : "");
  asked = fleet.state === "key";
}

byId("fallback").remove();
startKey();
startChat();
startStatus();
startReference();
onFleet(showHealth);
onKey(() => { asked = !hasKey(); }); // who forgets a key is not asked at once for another one
addEventListener("hashchange", showView);
showView();
startFleet();
