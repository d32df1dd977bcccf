// Builds elements. Text is only ever set as text: nothing here, or elsewhere, parses markup.

/**
 * An element. Attributes: `class`, `text` (its text), `on…` (a listener), or any other by its name; those that are
 * false, null or undefined are left out, and so are such children.
 */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Shows a text in a notice, hides the notice without one. */
export function notify(node, text) {
  node.textContent = text || "";
  node.hidden = !text;
}

/** Sets an element's text, if it is another one: what did not change is not announced or painted again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button that copies what `text()` returns. */
export function copyButton(text) {
  const button = make("button", { type: "button", class: "quiet copy", text: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed"; // browsers have a clipboard for https and localhost only
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
