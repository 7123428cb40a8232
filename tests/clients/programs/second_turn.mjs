// The AI SDK against a server: node second_turn.mjs URL PROMPT; prints one JSON object. Its default provider names items of
// the first answer in the second turn (item_reference), unless store is false.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, prompt] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const ways = {
  responses: [openai("tiny"), {}],
  stateless: [openai("tiny"), { openai: { store: false } }],
  chat: [openai.chat("tiny"), {}],
  compatible: [createOpenAICompatible({ name: "eyas", baseURL })("tiny"), {}],
  anthropic: [createAnthropic({ baseURL, apiKey: "none" })("tiny"), {}],
};
const made = {};
for (const [name, [model, providerOptions]] of Object.entries(ways)) {
  const asked = { model, providerOptions, maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
  const messages = [{ role: "user", content: prompt }];
  const first = await generateText({ ...asked, messages });
  const streamed = await streamText({ ...asked, messages }).text;
  messages.push(...first.response.messages, { role: "user", content: "And then?" });
  const second = await generateText({ ...asked, messages });
  made[name] = { first: first.text, streamed, second: second.text, tokens: first.usage.outputTokens };
}
console.log(JSON.stringify(made));
