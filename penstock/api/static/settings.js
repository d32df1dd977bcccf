// The chat's settings: a form whose values become fields of a request.

import { byId, make, notify } from "./dom.js";
import { getJson } from "./http.js";
import { load, save } from "./session.js";

const form = byId("settings-form");
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export function startSettings() {
  const kept = load("settings", {});
  for (const field of form.elements) {
    if (field.name && field.name !== "model" && kept[field.name] !== undefined) field.value = kept[field.name];
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    const values = [...form.elements].filter((field) => field.name).map((field) => [field.name, field.value]);
    save("settings", Object.fromEntries(values));
    notify(byId("settings-error"), "");
  });
  if (matchMedia("(max-width: 50rem)").matches) byId("settings").open = false;
}

/** Fills the list of models, adapters included. Throws ServerError. */
export async function listModels() {
  const names = (await getJson("/v1/models")).data.map((model) => model.id);
  const select = form.elements.model;
  const wanted = select.value || load("settings", {}).model;
  select.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
  if (names.includes(wanted)) select.value = wanted;
}

export const system = () => form.elements.system.value;

/**
 * The fields of a request that are set. `chat`: whether for the chat API. Throws an Error that names the field if one
 * has a wrong value.
 */
export function requestFields(chat) {
  const fields = { model: form.elements.model.value || undefined };
  for (const name of NUMBERS) {
    const field = form.elements[name];
    const label = field.labels[0].textContent.trim();
    if (!field.validity.valid) throw new Error(`${label}: ${field.validationMessage}`);
    if (field.value !== "") fields[name] = Number(field.value);
  }
  if (form.elements.stop.value) fields.stop = form.elements.stop.value;
  const tools = form.elements.tools.value.trim();
  if (chat && tools) fields.tools = toolsOf(tools);
  return fields;
}

function toolsOf(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: not JSON (${error.message})`);
  }
  return Array.isArray(tools) ? tools : [tools];
}

/** Shows what is wrong with the settings. */
export function settingsError(text) {
  byId("settings").open = true;
  notify(byId("settings-error"), text);
}
