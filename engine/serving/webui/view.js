// One message on the page.
import { button, copy, download, el } from "./dom.js";
import { Markdown } from "./markdown.js";
import { Tokens } from "./tokens.js";

const ENDS = { length: "ended at the limit of tokens", stopped: "stopped" };

// `actions`: what the buttons call, each with the message: again(message, seed), edit(message, text), turn(message, step),
// tokens(message), trace(message, index of a token), verify(message).
export class MessageView {
  constructor(conversation, message, actions) {
    this.conversation = conversation;
    this.message = message;
    this.actions = actions;
    this.answer = message.role === "assistant";
    this.heading = el("h2", { text: this.answer ? "Answer" : "You" });
    this.thoughts = el("details", { class: "thoughts", hidden: true }, el("summary", { text: "Thoughts" }));
    this.thought = new Markdown();
    this.thoughts.append(this.thought.element);
    this.body = this.answer ? new Markdown() : null;
    this.content = this.answer ? this.body.element : el("p", { class: "typed" });
    this.main = el("div", { class: "main" }, this.thoughts, this.content);
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.stats = el("p", { class: "stats" });
    this.bar = el("div", { class: "bar" });
    this.verdict = el("p", { class: "verdict", role: "status" });
    this.element = el("article", { class: this.answer ? "answer" : "user" }, this.heading, this.main, this.error);
    if (this.answer) this.element.append(this.stats);
    this.element.append(this.bar, this.verdict);
    this.thinking = false;
    this.tokens = null; // the view of tokens, if it is what is shown
    this.update(false);
  }

  // Show the message as it is now; busy: it is still being received.
  update(busy) {
    const { message } = this;
    this.element.setAttribute("aria-busy", String(busy));
    this.element.classList.toggle("busy", busy);
    if (this.answer) this.body.show(message.content);
    else this.content.textContent = message.content;
    if (message.reasoning) this.thought.show(message.reasoning);
    this.thoughts.hidden = !message.reasoning || this.tokens !== null;
    // Thoughts are shown until the answer begins, or as the user likes.
    const thinking = busy && !message.content;
    if (thinking !== this.thinking) this.thoughts.open = thinking;
    this.thinking = thinking;
    this.tokens?.show(message.tokens ?? []);
    this.error.textContent = message.error ?? "";
    this.error.hidden = !message.error;
    this.stats.textContent = this.answer ? this.summary(busy) : "";
    if (busy) this.bar.replaceChildren();
    else if (!this.bar.childElementCount) this.bar.append(...this.buttons());
  }

  summary(busy) {
    const { message } = this;
    const { promptN, cacheN, promptRate, answerN, answerRate, drafted, kept } = message.stats ?? {};
    const parts = [];
    if (busy && !answerN) return "Waiting for the first token …";
    if (answerN) parts.push(`${answerN} tokens${answerRate ? `, ${rate(answerRate)}` : ""}`);
    if (promptN) {
      const cached = cacheN ? `, ${cacheN} from the cache` : "";
      parts.push(`prompt: ${promptN} tokens${cached}${promptRate ? `, ${rate(promptRate)}` : ""}`);
    }
    if (drafted) parts.push(`${kept} of ${drafted} drafts kept`);
    if (message.edited) parts.push("edited");
    if (message.seed !== undefined && !message.edited) parts.push(`seed ${message.seed}`);
    if (message.finish in ENDS) parts.push(ENDS[message.finish]);
    const twin = busy ? -1 : this.conversation.siblings(message).findIndex((each) => each !== message && equal(each, message));
    if (twin >= 0) parts.push(`the same text as answer ${twin + 1}`);
    return parts.join(" · ");
  }

  buttons() {
    const { message, actions } = this;
    const siblings = this.conversation.siblings(message);
    const made = [button("Copy", () => copy(message.content), { "aria-label": `Copy the ${this.answer ? "answer" : "message"}` })];
    made.push(button("Edit", () => this.edit(), { "aria-label": `Edit the ${this.answer ? "answer" : "message"} in a new branch` }));
    if (this.answer) {
      if (message.seed !== undefined && !message.edited)
        made.push(button("Same seed", () => actions.again(message, message.seed), { "aria-label": "Answer again with the same seed" }));
      made.push(button("New seed", () => actions.again(message, null), { "aria-label": "Answer again with a new seed" }));
      if (message.tokens?.length || (["stop", "length"].includes(message.finish) && !message.edited)) {
        const toggle = () => actions.tokens(message);
        made.push(button("Tokens", toggle, { "aria-pressed": String(this.tokens !== null), "aria-label": "Show the probabilities of tokens" }));
      }
      if (message.receipt) {
        made.push(button("Verify this answer", () => actions.verify(message)));
        const text = () => JSON.stringify(message.receipt);
        made.push(button("Receipt", () => download("receipt.json", text()), { "aria-label": "Save the receipt as a file" }));
      }
    }
    if (siblings.length > 1) {
      const at = siblings.indexOf(message);
      const step = (text, by, name) =>
        button(text, () => actions.turn(message, by), { "aria-label": name, disabled: !siblings[at + by], class: "turn" });
      const what = this.answer ? "answer" : "message";
      made.push(el("span", { class: "branch" }, step("‹", -1, `The ${what} before`), `${at + 1} of ${siblings.length}`, step("›", 1, `The next ${what}`)));
    }
    return made;
  }

  // Show tokens instead of the text, or the text again.
  toggleTokens() {
    if (this.tokens) {
      this.tokens.element.replaceWith(this.content);
      this.tokens = null;
    } else {
      this.tokens = new Tokens((at) => this.actions.trace(this.message, at));
      this.content.replaceWith(this.tokens.element);
    }
    this.bar.replaceChildren();
    this.update(false);
    this.bar.querySelector("[aria-pressed]")?.focus();
  }

  // A field in the place of the message, whose text becomes a new branch.
  edit() {
    const area = el("textarea", { rows: "4", "aria-label": `The new ${this.answer ? "answer" : "message"}` });
    area.value = this.message.content;
    const close = () => {
      form.replaceWith(this.main);
      this.bar.hidden = false;
      this.bar.querySelector("button:nth-of-type(2)").focus();
    };
    const save = () => {
      if (!this.answer && !area.value.trim()) return area.focus();
      this.actions.edit(this.message, area.value);
    };
    const form = el("form", { class: "edit" }, area);
    form.append(el("div", { class: "bar" }, button(this.answer ? "Save" : "Send", save), button("Cancel", close)));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      else if (event.key === "Escape") close();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.main.replaceWith(form);
    this.bar.hidden = true;
    area.focus();
    form.scrollIntoView({ block: "nearest" });
  }
}

const rate = (value) => `${value >= 100 ? Math.round(value) : value.toFixed(1)} tokens/s`;

const equal = (a, b) => a.finish === b.finish && a.content === b.content && a.reasoning === b.reasoning && a.content !== "";
