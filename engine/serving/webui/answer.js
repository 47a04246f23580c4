// One answer of the server, from the request to its end.
import { events } from "./api.js";
import { fields } from "./settings.js";

// The body of the request for an answer, without how it is sent.
export function request(conversation, message, settings) {
  const { system } = settings;
  const before = conversation.before(message).filter((each) => each.role === "user" || each.content);
  return {
    messages: [
      ...(system.trim() ? [{ role: "system", content: system }] : []),
      ...before.map(({ role, content }) => ({ role, content })),
    ],
    ...fields(settings, message.seed),
  };
}

// Fill an answer of a conversation, whose seed is `message.seed`. It grows while it is received; `onchange` is called each
// time. Afterwards `message.finish` says why it ended: "stop", "length", "stopped" by the user, or "error", with
// `message.error`. Throws ServerError with status 401 if the API key is missing or wrong.
export async function receive(conversation, message, { signal, logprobs, onchange }) {
  message.content = "";
  for (const name of ["reasoning", "error", "finish", "tokens", "receipt", "stats"]) delete message[name];
  try {
    const settings = { ...conversation.settings, logprobs: logprobs || conversation.settings.logprobs };
    const body = {
      ...request(conversation, message, settings),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    if (settings.logprobs) message.tokens = [];
    for await (const event of events("v1/chat/completions", body, signal)) {
      take(message, event);
      onchange();
    }
  } catch (error) {
    if (error.status === 401) throw error;
    message.finish = error.name === "AbortError" ? "stopped" : "error";
    if (message.finish === "error") message.error = error.message;
  }
}

function take(message, event) {
  const [choice] = event.choices ?? [];
  message.model = event.model;
  message.fingerprint = event.system_fingerprint;
  if (choice) {
    message.content += choice.delta.content ?? "";
    if (choice.delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
    if (choice.logprobs?.content && message.tokens) message.tokens.push(...choice.logprobs.content);
    message.finish = choice.finish_reason ?? message.finish;
    if (choice.receipt) message.receipt = choice.receipt;
  }
  if (event.usage) message.stats = { ...message.stats, ...counts(event.usage) };
  if (event.timings) message.stats = { ...message.stats, ...rates(event.timings) };
}

function counts(usage) {
  const details = usage.completion_tokens_details ?? {};
  const kept = details.accepted_prediction_tokens ?? 0;
  return {
    promptN: usage.prompt_tokens,
    cacheN: usage.prompt_tokens_details?.cached_tokens ?? 0,
    answerN: usage.completion_tokens,
    drafted: kept + (details.rejected_prediction_tokens ?? 0),
    kept,
  };
}

function rates(timings) {
  return { promptRate: timings.prompt_n ? timings.prompt_per_second : 0, answerRate: timings.predicted_per_second };
}
