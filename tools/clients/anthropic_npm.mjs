// What Anthropic's official JavaScript client makes of a server: `node anthropic_npm.mjs URL MODEL FOLDER`,
// where FOLDER holds node_modules/@anthropic-ai/sdk. One JSON line each.
import assert from "node:assert";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const resolve = createRequire(path.resolve(folder, "package.json")).resolve;
const { default: Anthropic } = await import(pathToFileURL(resolve("@anthropic-ai/sdk")));
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const tell = (check, found = {}) => console.log(JSON.stringify({ check, ...found }));

const chat = { model, temperature: 0, max_tokens: 12, messages: [{ role: "user", content: "Who is Lily?" }] };
const whole = await client.messages.create(chat);
const streamed = await client.messages.stream(chat).finalMessage();
assert.equal(streamed.content[0].text, whole.content[0].text);
tell("messages, whole and streamed", { text: whole.content[0].text, usage: streamed.usage });

const input_schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Köln", "Bonn"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ name: "weather", description: "How it is outside", input_schema }];
const messages = [{ role: "user", content: "Use the weather tool." }];
const asked = { model, temperature: 0, max_tokens: 60, tools };
const called = await client.messages.stream({ ...asked, messages }).finalMessage();
const block = called.content.find((one) => one.type === "tool_use");
assert.deepEqual(block.input, { city: "Köln" });
const result = { type: "tool_result", tool_use_id: block.id, content: "dry in Köln" };
messages.push({ role: "assistant", content: called.content }, { role: "user", content: [result] });
const answer = await client.messages.create({ ...asked, messages });
assert.equal(answer.content[0].text, "It is dry in Köln.");
tell("a tool's round trip", { called: block.input, answer: answer.content[0].text });

await assert.rejects(client.messages.create({ ...chat, model: "other" }), Anthropic.NotFoundError);
tell("an error", { kind: "NotFoundError" });
