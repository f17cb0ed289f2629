// What the official JavaScript client makes of a server: `node openai_npm.mjs URL MODEL FOLDER`, where
// FOLDER holds node_modules/openai. One JSON line each.
import assert from "node:assert";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const resolve = createRequire(path.resolve(folder, "package.json")).resolve;
const { default: OpenAI } = await import(pathToFileURL(resolve("openai")));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Who is Lily?" }];
const tell = (check, found = {}) => console.log(JSON.stringify({ check, ...found }));

const listed = [];
for await (const one of client.models.list()) listed.push(one.id);
assert(listed.includes(model));
tell("models");

const prompt = { model, prompt: "Once upon a time", temperature: 0, max_tokens: 12 };
const whole = await client.completions.create(prompt);
let text = "";
for await (const part of await client.completions.create({ ...prompt, stream: true })) {
  text += part.choices[0].text;
}
assert.equal(text, whole.choices[0].text);
tell("completions, whole and streamed", { text });

const chat = { model, messages, temperature: 0, max_tokens: 12 };
const answer = await client.chat.completions.create(chat);
text = "";
let usage;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const part of await client.chat.completions.create({ ...chat, ...options })) {
  text += part.choices[0]?.delta?.content ?? "";
  usage = part.usage ?? usage;
}
assert.equal(text, answer.choices[0].message.content);
tell("chat, whole and streamed", { text, usage });

const parameters = {
  type: "object",
  properties: { city: { enum: ["Köln", "Bonn"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "Outside", parameters } }];
const runner = client.chat.completions.stream({ ...chat, max_tokens: 90, tools, tool_choice: "required" });
const call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
assert(["Köln", "Bonn"].includes(JSON.parse(call.arguments).city));
tell("chat, a tool, streamed", { called: call });

const request = { model, input: "Who is Lily?", temperature: 0, max_output_tokens: 12 };
const response = await client.responses.create(request);
text = "";
for await (const event of await client.responses.create({ ...request, stream: true })) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.equal(text, response.output_text);
tell("responses, whole and streamed", { text });

await assert.rejects(client.completions.create({ ...prompt, top_p: 7 }), OpenAI.BadRequestError);
tell("an error", { kind: "BadRequestError" });
