// The one dialog of the page: a question with a field, or one that is just confirmed.
import { byId } from "./dom.js";

// Ask the user. `label`: that of a field, none without it; `value`: what the field has at first; `kind`: the type of the field.
// Resolves to the text of the field, true without a field, and null if the user cancels.
export function ask({ title, text = "", label = "", value = "", kind = "text", confirm }) {
  const dialog = byId("dialog"), input = byId("dialog-input");
  byId("dialog-title").textContent = title;
  byId("dialog-text").textContent = text;
  byId("dialog-text").hidden = !text;
  byId("dialog-label").textContent = label;
  byId("dialog-field").hidden = !label;
  input.type = kind;
  input.value = value;
  input.disabled = !label;
  byId("dialog-confirm").textContent = confirm;
  dialog.showModal();
  if (label) input.select();
  return new Promise((resolve) => {
    const end = (confirmed) => {
      resolve(!confirmed ? null : label ? input.value : true);
      input.value = ""; // a key must not stay in the page
      dialog.close();
    };
    byId("dialog-form").onsubmit = (event) => {
      event.preventDefault();
      end(event.submitter?.value !== "cancel");
    };
    // By Escape. The event comes late: the dialog may be open again.
    dialog.onclose = () => dialog.open || end(false);
  });
}
