// Elements of the page. Nothing here or elsewhere parses HTML: text is only ever text.

export const byId = (id) => document.getElementById(id);

/** A new element with a class and children, which are elements or text. */
export function element(kind, className = "", ...children) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** A button that does not submit. */
export function button(className, label, onclick) {
  const made = element("button", className, label);
  made.type = "button";
  made.onclick = onclick;
  return made;
}

/** A button that copies `text()` and says so for a moment. */
export function copyButton(label, text) {
  const made = button("quiet copy", "Copy", async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = "Copy"), 2000);
  });
  made.ariaLabel = label;
  return made;
}

async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  // Browsers lend the clipboard to https and to this machine alone; elsewhere there is the older way.
  const active = document.activeElement;
  const field = element("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  active?.focus();
  return copied;
}
