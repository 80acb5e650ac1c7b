// Small helpers that build elements. Text always goes in as text nodes, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element with attributes and children (elements or text). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element with attributes and children. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets text only where it differs, so that live regions and selections are not disturbed. */
export function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

/**
 * Makes the children of `parent` follow `items`: an element is built again only when its signature changed.
 * `key` and `signature` give strings; `build` gives a new element.
 */
export function reconcile(parent, items, key, signature, build) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = key(item);
    const mark = signature(item);
    let element = old.get(id);
    old.delete(id);
    if (element && element.dataset.mark === mark) {
      if (element === at) at = at.nextElementSibling;
      else parent.insertBefore(element, at);
      continue;
    }
    const fresh = build(item, element ?? null);
    fresh.dataset.key = id;
    fresh.dataset.mark = mark;
    if (element) {
      if (element === at) at = at.nextElementSibling;
      element.remove();
    }
    parent.insertBefore(fresh, at);
  }
  for (const element of old.values()) element.remove();
}

/** Offers `text` (or a Blob) to the browser as a file. */
export function saveFile(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
