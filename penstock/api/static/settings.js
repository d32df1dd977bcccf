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
  if (!matchMedia("(max-width: 50rem)").matches) return;
  for (const part of [byId("settings"), byId("history")]) {
    part.open = false;
    part.name = "side"; // one at a time
  }
}

/** Fills the list of models, adapters included. Returns whether any of them makes text, and sees images. Throws ServerError. */
export async function listModels() {
  const models = (await getJson("/v1/models")).data;
  const names = models.map((model) => model.id);
  const select = form.elements.model;
  const wanted = select.value || load("settings", {}).model;
  select.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
  if (names.includes(wanted)) select.value = wanted;
  return {
    text: models.some((model) => model.tasks?.includes("generate") ?? true),
    images: models.some((model) => model.input_modalities?.includes("image")),
  };
}

export const system = () => form.elements.system.value;

export function setSystem(text) {
  form.elements.system.value = text;
  form.dispatchEvent(new Event("input"));
}

/** What the chat template knows of thinking: variables by which it is switched, and whether it takes an effort. */
let thinking = { switches: [], offered: "" };

/** Offers to switch thinking, if the template reads one of the `variables` that do. */
export function offerThinking(variables) {
  const offered = variables.join();
  if (offered === thinking.offered) return;
  const switches = variables.filter((name) => name !== "reasoning_effort");
  thinking = { switches, offered };
  const values = [...(switches.length ? ["on", "off"] : []), ...(variables.includes("reasoning_effort") ? ["low", "medium", "high"] : [])];
  const select = form.elements.thinking;
  const wanted = select.value || load("settings", {}).thinking;
  select.replaceChildren(...["", ...values].map((value) => make("option", { value, text: value || "default" })));
  select.value = values.includes(wanted) ? wanted : "";
  byId("thinking").hidden = !values.length;
}

function thinkingFields(value) {
  if (!value) return {};
  if (value !== "on" && value !== "off") return { reasoning_effort: value };
  return { chat_template_kwargs: Object.fromEntries(thinking.switches.map((name) => [name, value === "on"])) };
}

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
  if (chat) Object.assign(fields, thinkingFields(form.elements.thinking.value));
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
