// The AI SDK and the openai package of npm. The environment gives the base URL of the API.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = "none";
const MODEL = "penstock-demo";
const prompt = "What does os.path.join do?";
const schema = z.object({ sure: z.boolean(), kind: z.enum(["reader", "writer"]) });
const compatible = createOpenAICompatible({
  name: "penstock",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = { compatible: compatible(MODEL), openai: createOpenAI({ baseURL, apiKey }).chat(MODEL) };
const tools = {
  add: tool({
    description: "Add two truths.",
    inputSchema: z.object({ first: z.boolean(), second: z.boolean() }),
    execute: ({ first, second }) => Number(first) + Number(second),
  }),
};
const brief = { prompt, maxRetries: 0, maxOutputTokens: 300, temperature: 0 };

for (const [name, model] of Object.entries(models)) {
  test(`${name}: text, streamed and not`, async () => {
    const whole = await generateText({ model, ...brief, system: "Be brief." });
    assert.ok(whole.text && whole.usage.outputTokens);
    const stream = streamText({ model, ...brief, system: "Be brief." });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${name}: an object, streamed and not`, async () => {
    const { object } = await generateObject({ model, ...brief, schema });
    assert.ok(schema.parse(object));
    const stream = streamObject({ model, ...brief, schema });
    for await (const piece of stream.partialObjectStream) assert.equal(typeof piece, "object");
    assert.deepEqual(await stream.object, object);
  });

  test(`${name}: an output of generateText`, async () => {
    const { output } = await generateText({ model, ...brief, output: Output.object({ schema }) });
    assert.ok(schema.parse(output));
  });

  test(`${name}: one of a list`, async () => {
    const { object } = await generateObject({ model, ...brief, output: "enum", enum: ["yes", "no"] });
    assert.ok(["yes", "no"].includes(object));
  });

  test(`${name}: a call that must be made`, async () => {
    const { toolResults } = await generateText({ model, ...brief, tools, toolChoice: "required" });
    assert.ok(toolResults.length > 0);
    for (const { output } of toolResults) assert.equal(typeof output, "number");
  });

  test(`${name}: a call of a named tool, streamed`, async () => {
    const toolChoice = { type: "tool", toolName: "add" };
    const { toolCalls } = streamText({ model, ...brief, tools, toolChoice });
    assert.deepEqual((await toolCalls).map(({ toolName }) => toolName), ["add"]);
  });

  test(`${name}: tools that the model may call`, async () => {
    const { text, steps } = await generateText({ model, ...brief, tools, stopWhen: stepCountIs(3) });
    assert.ok(text || steps.length === 3);
  });

  test(`${name}: a stream that is aborted`, async () => {
    const controller = new AbortController();
    const { textStream } = streamText({ model, prompt, abortSignal: controller.signal, onError() {} });
    for await (const piece of textStream) if (piece) controller.abort();
  });
}

test("zod's usual parts", async () => {
  const wanted = z.object({
    mail: z.email().max(20),
    when: z.iso.date(),
    count: z.number().int().positive().max(9),
    union: z.discriminatedUnion("k", [z.object({ k: z.literal("a") }), z.object({ k: z.literal("b") })]),
    flags: z.record(z.string(), z.boolean()),
    pair: z.tuple([z.boolean(), z.boolean()]),
    maybe: z.boolean().nullable(),
  });
  const { object } = await generateObject({ model: models.compatible, ...brief, schema: wanted });
  assert.ok(wanted.parse(object));
});

test("openai: whole, streamed, parsed", async () => {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const request = { model: MODEL, messages: [{ role: "user", content: prompt }], max_tokens: 100, temperature: 0 };
  const whole = await client.chat.completions.create(request);
  let text = "";
  for await (const event of await client.chat.completions.create({ ...request, stream: true }))
    text += event.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  const parsed = await client.chat.completions.parse({ ...request, response_format: zodResponseFormat(schema, "answer") });
  assert.ok(schema.parse(parsed.choices[0].message.parsed));
  await assert.rejects(client.chat.completions.create({ ...request, model: "none" }), OpenAI.NotFoundError);
});

test("openai: a runner of tools", async () => {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const add = { name: "add", parameters: z.toJSONSchema(tools.add.inputSchema), parse: JSON.parse, function: tools.add.execute };
  const runner = client.chat.completions.runTools(
    { model: MODEL, messages: [{ role: "user", content: prompt }], tools: [{ type: "function", function: add }], max_tokens: 100 },
    { maxChatCompletions: 3 },
  );
  assert.ok((await runner.finalMessage()).role);
});
