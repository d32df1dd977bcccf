// One streamed round of a tool with SDKs of npm, each over its own API. The environment gives the server's URL
// and what its script says.

import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { GoogleGenAI } from "@google/genai";
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { ChatOllama } from "@langchain/ollama";
import { ChatOpenAI } from "@langchain/openai";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

const { MODEL, QUESTION, TOOL, SAYS, RESULT, REPORT } = JSON.parse(process.env.SCRIPTED);
const url = process.env.SCRIPTED_URL;
const apiKey = "none";
const description = "The speed of a machine.";
const parameters = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const wanted = { name: "pump ä" };
setTracingDisabled(true);

test("@anthropic-ai/sdk", async () => {
  const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  const messages = [{ role: "user", content: QUESTION }];
  const tools = [{ name: TOOL, description, input_schema: parameters }];
  const ask = () => client.messages.stream({ model: MODEL, max_tokens: 300, messages, tools }).finalMessage();
  const first = await ask();
  const call = first.content.find(({ type }) => type === "tool_use");
  assert.equal(first.content.find(({ type }) => type === "text").text, SAYS);
  assert.deepEqual(call.input, wanted);
  messages.push({ role: "assistant", content: first.content });
  messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: RESULT }] });
  assert.equal((await ask()).content.at(-1).text, REPORT);
});

test("ollama", async () => {
  const client = new Ollama({ host: url });
  const messages = [{ role: "user", content: QUESTION }];
  const tools = [{ type: "function", function: { name: TOOL, description, parameters } }];
  const ask = async () => {
    const said = { role: "assistant", content: "", tool_calls: [] };
    for await (const { message } of await client.chat({ model: MODEL, messages, tools, stream: true })) {
      said.content += message.content;
      said.tool_calls.push(...(message.tool_calls ?? []));
    }
    return said;
  };
  const first = await ask();
  assert.equal(first.content, SAYS);
  assert.deepEqual(first.tool_calls.map((call) => call.function.arguments), [wanted]);
  messages.push(first, { role: "tool", content: RESULT, tool_name: TOOL });
  assert.equal((await ask()).content, REPORT);
});

test("@google/genai", async () => {
  const client = new GoogleGenAI({ apiKey, httpOptions: { baseUrl: url } });
  const contents = [{ role: "user", parts: [{ text: QUESTION }] }];
  const config = { tools: [{ functionDeclarations: [{ name: TOOL, description, parametersJsonSchema: parameters }] }] };
  const ask = async () => {
    const parts = [];
    for await (const chunk of await client.models.generateContentStream({ model: MODEL, contents, config }))
      parts.push(...(chunk.candidates[0].content?.parts ?? []));
    return [parts, parts.filter(({ thought }) => !thought).map(({ text }) => text ?? "").join("")];
  };
  const [parts, text] = await ask();
  assert.equal(text, SAYS);
  assert.deepEqual(parts.flatMap((part) => part.functionCall?.args ?? []), [wanted]);
  const functionResponse = { name: TOOL, response: { output: RESULT } };
  contents.push({ role: "model", parts }, { role: "user", parts: [{ functionResponse }] });
  assert.equal((await ask())[1], REPORT);
});

const chat = { apiKey, model: MODEL, maxRetries: 0 };
const openai = { ...chat, configuration: { baseURL: `${url}/v1` } };
for (const [name, model] of Object.entries({
  "@langchain/openai chat": new ChatOpenAI(openai),
  "@langchain/openai responses": new ChatOpenAI({ ...openai, useResponsesApi: true }),
  "@langchain/anthropic": new ChatAnthropic({ ...chat, anthropicApiUrl: url }),
  "@langchain/ollama": new ChatOllama({ model: MODEL, baseUrl: url, maxRetries: 0 }),
}))
  test(name, async () => {
    const bound = model.bindTools([{ type: "function", function: { name: TOOL, description, parameters } }]);
    const ask = async (messages) => {
      let whole;
      for await (const piece of await bound.stream(messages)) whole = whole?.concat(piece) ?? piece;
      return whole;
    };
    const question = new HumanMessage(QUESTION);
    const first = await ask([question]);
    assert.equal(first.text, SAYS);
    const [call] = first.tool_calls;
    assert.deepEqual(call.args, wanted);
    const result = new ToolMessage({ content: RESULT, tool_call_id: call.id, name: TOOL });
    assert.equal((await ask([question, first, result])).text, REPORT);
  });

for (const Model of [OpenAIChatCompletionsModel, OpenAIResponsesModel])
  test(`@openai/agents ${Model.name}`, async () => {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
    const execute = ({ name }) => (assert.equal(name, wanted.name), RESULT);
    const speed = tool({ name: TOOL, description, parameters: z.object({ name: z.string() }), execute });
    const agent = new Agent({ name: "Helper", model: new Model(client, MODEL), tools: [speed] });
    const stream = await run(agent, QUESTION, { stream: true });
    for await (const _ of stream);
    await stream.completed;
    assert.equal(stream.finalOutput, REPORT);
  });
