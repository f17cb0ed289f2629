// One turn of Vercel's AI SDK: node vercel.mjs KIND URL. Prints the last answer.

import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";

const [kind, url] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, apiKey: "none" });
const filler = kind === "long" ? "The quick brown fox jumps over the lazy dog. ".repeat(1000) : "";
const content = [{ type: "text", text: `${filler}Do ai-${kind} now.` }];
if (kind === "image") content.push({ type: "image", image: readFileSync("picture.png") });
if (kind === "pdf") content.push({ type: "file", data: readFileSync("paper.pdf"), mediaType: "application/pdf" });
const history = kind !== "cut" ? [] : [
  { role: "user", content: "Look it up." },
  { role: "assistant", content: [{ type: "tool-call", toolCallId: "c1", toolName: "lookup", input: '{"key": "a' }] },
  { role: "tool", content: [{ type: "tool-result", toolCallId: "c1", toolName: "lookup", output: { type: "error-text", value: "no JSON" } }] },
];
const inputSchema = jsonSchema({ type: "object", properties: { key: { type: "string" } }, required: ["key"] });
const lookup = tool({ description: "Look a key up", inputSchema, execute: async () => `RESULT-${7000 + 731}` });
try {
  const { text } = await generateText({
    model: provider("agent"), messages: [...history, { role: "user", content }], tools: { lookup }, stopWhen: stepCountIs(3),
  });
  console.log(text);
} catch (error) {
  console.error(`${error.name}: ${error.message} ${error.responseBody ?? ""}`);
  process.exit(1);
}
