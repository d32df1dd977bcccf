// Shows JSON schemas of the API's description: types, and tables of fields.

import { make } from "./dom.js";

export const nameOf = (ref) => ref.split("/").pop();

/** A short text for a type, such as `[integer] | string`. */
export function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((type) => type !== "null").join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `[${typeOf(schema.items ?? {})}]`;
  return schema.type ?? "any";
}

function bounds(schema) {
  const parts = (schema.anyOf ?? [schema]).flatMap((part) => [
    part.minimum !== undefined && `at least ${part.minimum}`,
    part.exclusiveMinimum !== undefined && `above ${part.exclusiveMinimum}`,
    part.maximum !== undefined && `at most ${part.maximum}`,
    part.maxLength !== undefined && `at most ${part.maxLength} characters`,
  ]).filter(Boolean);
  if (schema.default !== undefined && schema.default !== null) parts.push(`default ${JSON.stringify(schema.default)}`);
  return [...new Set(parts)].join(", ");
}

/** A row for a name with a schema. */
export function fieldRow(name, schema, required, place = "") {
  const about = [schema.description, bounds(schema)].filter(Boolean).join(" · ");
  return make("tr", {},
    make("th", { scope: "row" }, make("code", { text: name }), required && make("span", { class: "required", text: " required" })),
    make("td", { class: "type", text: [place, typeOf(schema)].filter(Boolean).join(" ") }),
    make("td", { text: about }));
}

/** The fields of an object's schema. */
export function fields(schema) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => fieldRow(name, field, required.includes(name)));
  return make("div", { class: "scroll" }, make("table", { class: "fields" }, make("tbody", {}, ...rows)));
}
