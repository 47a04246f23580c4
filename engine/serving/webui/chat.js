// The conversation that is shown, and the answer that is being received, which may belong to another one.
import { json } from "./api.js";
import { receive, request } from "./answer.js";
import { newSeed } from "./conversation.js";
import { announce, byId, notice } from "./dom.js";
import { seedOf } from "./settings.js";
import { save } from "./store.js";
import { MessageView } from "./view.js";

const SPOKEN = 2000; // characters of an answer that screen readers are given

export class Chat {
  // withKey: calls a function again with an API key, if it needs one; onchange: called when a conversation has changed.
  constructor(withKey, onchange) {
    this.withKey = withKey;
    this.onchange = onchange;
    this.conversation = null;
    this.views = [];
    this.running = null; // {conversation, message, controller, ended}
    this.list = byId("messages");
  }

  // Show a conversation.
  open(conversation) {
    this.conversation = conversation;
    notice("");
    this.render();
    this.list.scrollTop = this.list.scrollHeight;
  }

  // Show the path of the conversation; messages that stay keep their elements.
  render() {
    const path = this.conversation.path(), { list } = this;
    let same = 0;
    while (same < path.length && this.views[same]?.message === path[same]) same += 1;
    for (const view of this.views.splice(same)) view.element.remove();
    const actions = {
      again: (message, seed) => this.again(message, seed),
      edit: (message, text) => this.edit(message, text),
      turn: (message, by) => this.turn(message, by),
      tokens: (message) => this.tokens(message),
      trace: (message, at) => this.trace(message, at),
      verify: (message) => this.verify(message),
    };
    for (const message of path.slice(same)) {
      const view = new MessageView(this.conversation, message, actions);
      this.views.push(view);
      list.append(view.element);
    }
    for (const view of this.views) this.refresh(view);
    byId("empty").hidden = path.length > 0;
    this.state();
  }

  // Write a view anew, with the buttons that are possible now.
  refresh(view) {
    view.bar.replaceChildren();
    view.update(this.running?.message === view.message);
    for (const each of view.bar.querySelectorAll("button")) if (!each.disabled && each.textContent !== "Copy") each.disabled = this.running !== null;
  }

  viewOf(message) {
    return this.views.find((view) => view.message === message);
  }

  // Show which of sending and stopping is possible.
  state() {
    const focused = document.activeElement;
    byId("send").hidden = this.running !== null;
    byId("stop").hidden = this.running === null;
    if (focused === byId("send") || focused === byId("stop")) byId("message").focus();
  }

  // Send what has been typed; without it, ask for the answer to a last message that has none.
  send() {
    const field = byId("message"), last = this.conversation.path().at(-1) ?? null;
    if (this.running) return notice("Wait for the end of the answer, or stop it.");
    const text = field.value;
    if (!text.trim() && last?.role !== "user") return field.focus();
    const seed = this.seed();
    if (seed === null) return;
    const message = text.trim() ? this.conversation.add(last, "user", text) : last;
    field.value = "";
    this.run(this.conversation.add(message, "assistant", "", { seed }));
  }

  // The seed that the settings ask for; null if they are wrong, which is then said.
  seed() {
    try {
      return seedOf(this.conversation.settings);
    } catch (error) {
      notice(error.message);
      return null;
    }
  }

  stop() {
    this.running?.controller.abort();
  }

  // Answer again, in a new branch; seed: null for a new one.
  again(message, seed) {
    const before = this.conversation.parentOf(message);
    this.run(this.conversation.add(before, "assistant", "", { seed: seed ?? newSeed() }));
  }

  // A new branch with another text. One of the user is answered.
  edit(message, text) {
    const { conversation } = this, before = conversation.parentOf(message);
    if (message.role === "user") {
      const seed = this.seed();
      if (seed === null) return;
      this.run(conversation.add(conversation.add(before, "user", text), "assistant", "", { seed }));
      byId("message").focus();
    } else {
      const made = conversation.add(before, "assistant", text, { edited: true });
      this.render();
      this.keep(conversation);
      this.viewOf(made).bar.querySelector("button:nth-of-type(2)").focus();
    }
  }

  // Show another branch.
  turn(message, by) {
    const { conversation } = this, siblings = conversation.siblings(message);
    const other = siblings[siblings.indexOf(message) + by];
    conversation.show(other);
    this.render();
    this.keep(conversation);
    const buttons = [...this.viewOf(other).bar.querySelectorAll("button.turn")];
    (buttons[by < 0 ? 0 : 1].disabled ? buttons.find((each) => !each.disabled) : buttons[by < 0 ? 0 : 1]).focus();
    announce(`${siblings.indexOf(other) + 1} of ${siblings.length}`);
  }

  // Show the tokens of an answer. If their probabilities are not known, it is computed again: the same seed gives the same text.
  async tokens(message) {
    const { conversation } = this;
    if (!message.tokens?.length) {
      const copied = { ...message };
      await this.run(copied, { logprobs: true, shown: false });
      if (!copied.tokens?.length) return notice(copied.error ?? "There are no probabilities.");
      if (copied.content !== message.content)
        return notice("The server now gives another answer: the model, or the settings, have changed since.");
      message.tokens = copied.tokens;
    }
    if (this.conversation === conversation) this.viewOf(message)?.toggleTokens();
  }

  // The trace of the pass after which the token `at` of an answer was chosen.
  trace(message, at) {
    const answer = message.tokens.slice(0, at).map((token) => token.id);
    const body = { ...request(this.conversation, message, this.conversation.settings), answer, top_logprobs: 5 };
    return this.withKey(() => json("v1/trace", body));
  }

  // Let the server compute an answer again and compare it with its receipt.
  async verify(message) {
    const { verdict } = this.viewOf(message);
    verdict.textContent = "Computing it again …";
    try {
      const found = await this.withKey(() => json("v1/verify", { model: message.model, receipt: message.receipt }));
      verdict.textContent = found.same
        ? `Verified: the server gives these ${found.n_tokens} tokens again, from the same bits.`
        : `Not the same: ${found.problem}`;
    } catch (error) {
      verdict.textContent = error.message;
    }
  }

  // Receive an answer; shown: whether it belongs to the conversation, or is just computed.
  run(message, { logprobs = false, shown = true } = {}) {
    const { conversation } = this;
    const running = { conversation, message, controller: new AbortController() };
    this.running = running;
    running.ended = this.received(running, logprobs, shown);
    return running.ended;
  }

  async received({ conversation, message, controller }, logprobs, shown) {
    notice("");
    this.render();
    if (shown) {
      this.keep(conversation);
      this.list.scrollTop = this.list.scrollHeight;
    }
    announce("Answering.");
    let due = 0;
    const show = () => {
      due = 0;
      const view = this.conversation === conversation && this.viewOf(message);
      if (!view) return;
      const { list } = this, below = list.scrollHeight - list.scrollTop - list.clientHeight;
      view.update(true);
      if (below < 60) list.scrollTop = list.scrollHeight;
    };
    const options = { signal: controller.signal, logprobs };
    options.onchange = () => (due ||= requestAnimationFrame(show));
    try {
      await this.withKey(() => receive(conversation, message, options));
    } catch (error) {
      Object.assign(message, { finish: "error", error: error.message });
    }
    cancelAnimationFrame(due);
    this.running = null;
    const { list } = this, below = list.scrollHeight - list.scrollTop - list.clientHeight;
    this.render();
    if (shown && below < 60) list.scrollTop = list.scrollHeight;
    if (shown) this.keep(conversation);
    const tokens = message.stats?.answerN ?? 0;
    announce(message.error ? "" : `${message.content.slice(0, SPOKEN)} (${message.finish === "stopped" ? "Stopped" : "End of the answer"}, ${tokens} tokens.)`);
  }

  // Keep a conversation in the browser.
  keep(conversation) {
    conversation.updated = Date.now();
    try {
      save(conversation);
    } catch (error) {
      notice(error.message);
    }
    this.onchange();
  }
}
