// What this tab remembers over a reload. It is forgotten with the tab.

const PREFIX = "penstock.";

export function load(name, otherwise) {
  try {
    const text = sessionStorage.getItem(PREFIX + name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise; // no storage in this browser, or not what this page wrote
  }
}

/** Returns whether there was room. */
export function save(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function forget(name) {
  try {
    sessionStorage.removeItem(PREFIX + name);
  } catch {
    // no storage: nothing to forget
  }
}
