// Elements, made from text only: nothing here or elsewhere turns a string into HTML.

/** The element of the page with an id. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. Properties are set as such, `class`, `data-*`, `aria-*` and `role` as attributes, `on*` as
 * listeners; children are elements or text.
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

/** A button that does one thing. */
export function button(label, onclick, properties = {}) {
  return make("button", { type: "button", textContent: label, onclick, ...properties });
}

/** Makes a field as high as its text, between its rows and a bound. */
export function fitHeight(field, most = 240) {
  field.style.height = "auto";
  field.style.height = `${Math.min(most, field.scrollHeight + 2)}px`;
}

/** Puts text on the clipboard; false where the browser does not let the page. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
