// Nodes and buttons.

export function element(name, options = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function action(label, run) {
  const button = element("button", { type: "button", className: "plain" }, label);
  button.addEventListener("click", run);
  return button;
}

export function copyButton(text, label = "Copy") {
  const button = element("button", { type: "button", className: "plain copy" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

// Browsers offer the clipboard only on https and on this machine; elsewhere a selection is copied.
async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // go on without permission
    }
  }
  const field = element("textarea", { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
