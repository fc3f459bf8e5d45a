// Functions for elements and the clipboard. No module of the page parses a string as HTML.

/** Returns the element with an id. */
export const byId = (id) => document.getElementById(id);

/**
 * Creates an element. The entries `class`, `data-*`, `aria-*` and `role` become attributes, the entries `on*` become
 * listeners, and all other entries become properties. Children are elements or text; null is skipped.
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (/^(class$|role$|data-|aria-)/.test(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Creates a button. */
export function button(label, onclick, properties = {}) {
  return make("button", { type: "button", textContent: label, onclick, ...properties });
}

/** Sets the height of a text field to the height of its text, up to `maxHeight` pixels. */
export function fitHeight(field, maxHeight = 240) {
  field.style.height = "auto";
  field.style.height = `${Math.min(maxHeight, field.scrollHeight + 2)}px`;
}

/** Copies text to the clipboard; returns false if the browser does not permit it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
