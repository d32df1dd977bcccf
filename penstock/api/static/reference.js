// The API reference: every route of openapi.json with its fields and a form that sends.

import { byId, make, notify } from "./dom.js";
import { fleet, onFleet } from "./fleet.js";
import { getJson, onKey } from "./http.js";
import { requestForm } from "./request_form.js";
import { fieldRow, fields, nameOf, typeOf } from "./schema.js";

let shown = false;

/** Loads the description when the view is first seen. */
export function startReference() {
  const view = byId("api");
  const wanted = () => {
    if (!view.hidden && !shown) show();
  };
  new MutationObserver(wanted).observe(view, { attributes: true, attributeFilter: ["hidden"] });
  onKey(() => {
    shown = false;
    byId("api-body").replaceChildren();
    wanted();
  });
  onFleet(wanted);
  wanted();
}

async function show() {
  shown = true;
  try {
    const document = await getJson("/openapi.json");
    byId("api-body").replaceChildren(...page(document));
    notify(byId("api-note"), "");
  } catch (error) {
    shown = false;
    notify(byId("api-note"), error.status === 401 ? "The description needs an access key: the button above takes it." : `The description cannot be read: ${error.message}`);
  }
}

function page(document) {
  const { schemas } = document.components;
  const sections = new Map();
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      if (!sections.has(tag)) sections.set(tag, make("section", { class: "routes" }, make("h2", { text: tag })));
      sections.get(tag).append(routeNode({ path, method, operation }, schemas));
    }
  }
  const types = make("section", { class: "routes" }, make("h2", { text: "Types" }),
    ...Object.entries(schemas).map(([name, schema]) => typeNode(name, schema)));
  const intro = make("p", { class: "hint" }, `Penstock ${document.info.version}. The same for programs: `, make("code", { text: "openapi.json" }), ".");
  return [intro, filter([...sections.values(), types]), ...sections.values(), types];
}

function filter(sections) {
  const input = make("input", { type: "search", placeholder: "Find a route or a field", "aria-label": "Find a route or a field" });
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    for (const section of sections) {
      const entries = [...section.querySelectorAll("details.route")];
      for (const entry of entries) entry.hidden = !entry.dataset.words.includes(wanted);
      section.hidden = entries.every((entry) => entry.hidden);
    }
  });
  return input;
}

/** An entry whose inside is made when it is first opened. */
function entry(summary, words, inside) {
  const node = make("details", { class: "route", "data-words": words.toLowerCase() }, summary);
  node.addEventListener("toggle", () => {
    if (node.open && node.children.length === 1) node.append(...inside());
  });
  return node;
}

function routeNode(route, schemas) {
  const { path, method, operation } = route;
  const content = operation.requestBody?.content["application/json"];
  const named = content?.schema.$ref;
  const schema = named ? schemas[nameOf(named)] : content?.schema;
  const summary = make("summary", {}, make("span", { class: `method ${method}`, text: method.toUpperCase() }), make("code", { text: path }),
    make("span", { class: "about", text: operation.summary }));
  const words = [path, method, operation.summary, ...Object.keys(schema?.properties ?? {})].join(" ");
  return entry(summary, words, () => [
    requestForm({ ...route, example: content?.example ? exampleOf(content.example) : null, guarded: Boolean(operation.security) }),
    ...(operation.parameters ? [make("h3", { text: "Parameters" }), parameters(operation.parameters)] : []),
    ...(schema ? [make("h3", { text: "Fields of the body" }), fields(schema)] : []),
    make("h3", { text: "Replies" }), replies(operation.responses),
  ]);
}

/** The example with a model that the server has. */
function exampleOf(example) {
  const model = fleet.status?.models[0];
  return model && "model" in example ? { ...example, model } : example;
}

const parameters = (list) => make("div", { class: "scroll" }, make("table", { class: "fields" }, make("tbody", {},
  ...list.map((each) => fieldRow(each.name, { description: each.description, ...each.schema }, each.required, each.in)))));

function replies(responses) {
  const rows = Object.entries(responses).map(([status, reply]) => {
    const kinds = Object.entries(reply.content ?? {}).map(([kind, { schema }]) => `${kind}: ${typeOf(schema)}`);
    return make("tr", {}, make("th", { scope: "row", text: status }), make("td", { class: "type", text: kinds.join("; ") }), make("td", { text: reply.description }));
  });
  return make("div", { class: "scroll" }, make("table", { class: "fields" }, make("tbody", {}, ...rows)));
}

const typeNode = (name, schema) => entry(
  make("summary", {}, make("code", { text: name }), make("span", { class: "about", text: schema.description ?? "" })),
  [name, ...Object.keys(schema.properties ?? {})].join(" "),
  () => [fields(schema)]);
