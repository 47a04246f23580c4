// Runs one function of the AI SDK against a server and prints what came of it as JSON: the calls and the answers.
// Packages are looked up in the current folder; the argument is the JSON that vercel_ai.py makes.

import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const ai = require("ai");
const asked = JSON.parse(process.argv[2]);
const calls = [];
const answers = [];

function model() {
  if (asked.provider === "openai-compatible") {
    const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
    const settings = { name: "local", baseURL: `${asked.url}/v1`, includeUsage: true, supportsStructuredOutputs: true };
    return createOpenAICompatible(settings)(asked.model);
  }
  const openai = require("@ai-sdk/openai").createOpenAI({ baseURL: `${asked.url}/v1`, apiKey: "none" });
  return asked.provider === "openai" ? openai(asked.model) : openai.chat(asked.model);
}

const schema = ai.jsonSchema(asked.report);
const weather = ai.tool({
  description: "The weather of a city in the next days.",
  inputSchema: ai.jsonSchema(asked.parameters),
  execute: async (input) => {
    calls.push(input);
    return "21 degrees, sunny";
  },
});
// A small model writes one call after the other until its tokens are used up.
const providerOptions = { openai: { parallelToolCalls: false }, local: { parallel_tool_calls: false } };
const common = { model: model(), prompt: asked.prompt, maxOutputTokens: asked.tokens, maxRetries: 0 };
const tooled = {
  ...common,
  providerOptions,
  tools: { weather },
  output: ai.Output.object({ schema }),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
  stopWhen: ai.stepCountIs(asked.turns),
};

if (asked.name === "generateText") {
  answers.push((await ai.generateText(tooled)).output);
} else if (asked.name === "streamText") {
  const result = ai.streamText({ ...tooled, onError: ({ error }) => { throw error; } });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  answers.push(await result.output);
} else if (asked.name === "generateObject") {
  answers.push((await ai.generateObject({ ...common, schema })).object);
} else if (asked.name === "streamObject") {
  const result = ai.streamObject({ ...common, schema });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  answers.push(await result.object);
}
console.log(JSON.stringify({ calls, answers }));
