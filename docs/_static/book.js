// What the pages do by themselves: buttons that copy code, and a line above what is wider than the page and scrolls.

(() => {
  "use strict";

  // --- copies --------------------------------------------------------------------------------------------------------

  const PROMPTS = { console: /^\$ /, pycon: /^(?:>>>|\.\.\.)(?: |$)/ };

  // What was typed in a session, without prompts and output; of other blocks, everything.
  function typed(text, language) {
    const prompt = PROMPTS[language];
    const lines = text.replace(/\n$/, "").split("\n");
    if (!prompt || !lines.some((line) => prompt.test(line))) return lines.join("\n");
    const found = [];
    let goes_on = false; // a command continues after a line that ends with a backslash
    for (const line of lines) {
      const is_typed = goes_on || prompt.test(line);
      if (is_typed) found.push(goes_on ? line : line.replace(prompt, ""));
      goes_on = is_typed && language === "console" && line.endsWith("\\");
    }
    return found.join("\n");
  }

  function add_button(block) {
    const language = /highlight-(\S+)/.exec(block.parentElement.className)?.[1];
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(typed(block.querySelector("pre").textContent, language));
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    block.append(button);
  }

  // --- tables and pictures that scroll -------------------------------------------------------------------------------

  function add_note(box) {
    const note = document.createElement("p");
    note.className = "scrolls";
    note.textContent = `This ${box.querySelector("table") ? "table" : "picture"} is wider than the page: scroll it sideways →`;
    box.before(note);
    // A box that scrolls can be reached by keyboard.
    new ResizeObserver(() => {
      const wide = box.scrollWidth > box.clientWidth + 1;
      note.hidden = !wide;
      if (wide) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }).observe(box);
  }

  // Without a secure connection, a page has no clipboard.
  if (navigator.clipboard) document.querySelectorAll("div.highlight:has(> pre)").forEach(add_button);
  document.querySelectorAll("[role=main] .table-wrapper, [role=main] p:has(> img.wide)").forEach(add_note);
})();
