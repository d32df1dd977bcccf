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

/** Sets an element's text, if it is another one: what did not change is not announced, painted or selected again. */
export function setText(node, text) {
  if (node.childNodes.length === 1 && node.firstChild.nodeType === Node.TEXT_NODE) edit(node.firstChild, text);
  else if (node.textContent !== text) node.textContent = text;
}

/** Changes a text node behind what is the same in both texts. */
function edit(node, text) {
  const { data } = node;
  if (data === text) return;
  let same = text.startsWith(data) ? data.length : 0;
  while (same < data.length && data[same] === text[same]) same += 1;
  node.replaceData(same, data.length - same, text.slice(same));
}

/** Makes a node of the page like another one, and leaves alone what is the same. Listeners stay those of the old one. */
export function become(node, other) {
  if (node.nodeName !== other.nodeName) node.replaceWith(other);
  else if (node.nodeType === Node.TEXT_NODE) edit(node, other.data);
  else {
    for (const { name } of [...node.attributes]) if (!other.hasAttribute(name)) node.removeAttribute(name);
    for (const { name, value } of other.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
    const [old, fresh] = [[...node.childNodes], [...other.childNodes]];
    fresh.forEach((child, place) => (old[place] ? become(old[place], child) : node.append(child)));
    for (const child of old.slice(fresh.length)) child.remove();
  }
}

/** Gives a node these children; those that it has already are not moved. */
export function setChildren(node, children) {
  let at = node.firstChild;
  for (const child of children) {
    if (child === at) at = at.nextSibling;
    else node.insertBefore(child, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** Copies a text. Browsers have a clipboard for https and localhost only; elsewhere a selection is copied. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = make("textarea", { class: "sr", readonly: true, "aria-hidden": "true" });
    const focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

/** Has the browser save a text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A button that copies what `text()` returns. */
export function copyButton(text) {
  const button = make("button", { type: "button", class: "quiet copy", text: "Copy" });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
