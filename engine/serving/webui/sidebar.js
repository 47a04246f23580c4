// The list of conversations, and what is done with them.
import { Conversation } from "./conversation.js";
import { ask } from "./dialog.js";
import { byId, button, download, el, notice } from "./dom.js";
import { all, exported, imported, list, load, remove, save } from "./store.js";

// chat: the conversation that is shown; open: shows another one.
export class Sidebar {
  constructor(chat, open) {
    this.chat = chat;
    this.open = open;
    byId("new").addEventListener("click", () => this.create());
    byId("rename").addEventListener("click", () => this.rename());
    byId("delete").addEventListener("click", () => this.remove());
    byId("export").addEventListener("click", () => this.export([chat.conversation]));
    byId("export-all").addEventListener("click", () => this.export(all()));
    byId("import").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => this.import());
  }

  // Write the list anew.
  show() {
    const { conversation } = this.chat;
    const items = list().map((each) => {
      const current = each.id === conversation.id;
      const pick = button(current ? conversation.name : each.name, () => this.pick(each.id), { "aria-current": current && "true" });
      return el("li", {}, pick);
    });
    // Only the list: the focus must stay where it is.
    const focused = [...byId("conversations").children].findIndex((item) => item.contains(document.activeElement));
    byId("conversations").replaceChildren(...items);
    if (focused >= 0) items[Math.min(focused, items.length - 1)]?.firstChild.focus();
    byId("title").textContent = conversation.name;
    document.title = conversation.messages.size ? `${conversation.name} – bitmirror` : "bitmirror";
  }

  pick(id) {
    const { running } = this.chat;
    const found = running?.conversation.id === id ? running.conversation : load(id);
    if (found) this.open(found);
    else this.show(); // another tab has deleted it
  }

  // A new conversation with the settings of the one that is shown.
  create() {
    this.open(new Conversation(this.chat.conversation?.settings));
    byId("message").focus();
  }

  async rename() {
    const { conversation } = this.chat;
    const title = await ask({ title: "Rename the conversation", label: "Title", value: conversation.name, confirm: "Rename" });
    if (title === null) return;
    conversation.title = title.trim().slice(0, 200);
    this.chat.keep(conversation);
  }

  async remove() {
    const { conversation, running } = this.chat;
    const text = `"${conversation.name}" is deleted with all of its branches. It cannot be brought back.`;
    if (!(await ask({ title: "Delete the conversation?", text, confirm: "Delete" }))) return;
    if (running?.conversation === conversation) {
      this.chat.stop();
      await running.ended; // which keeps it once more
    }
    remove(conversation);
    const [next] = list();
    this.open(next ? load(next.id) : new Conversation(conversation.settings));
  }

  export(conversations) {
    download("bitmirror-conversations.json", exported(conversations));
  }

  async import() {
    const [file] = byId("file").files;
    if (!file) return;
    try {
      const found = imported(await file.text());
      found.forEach(save);
      if (found.length) this.open(found[0]);
      notice(`${found.length} conversation${found.length === 1 ? " was" : "s were"} imported.`);
    } catch (error) {
      notice(error.message);
    }
    byId("file").value = "";
  }
}
