// One streamed round of a tool with the AI SDK over each API. The environment gives the server's URL and what
// its script says.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { MODEL, QUESTION, TOOL, THOUGHT, SAYS, RESULT, REPORT } = JSON.parse(process.env.SCRIPTED);
const baseURL = `${process.env.SCRIPTED_URL}/v1`;
const apiKey = "none";
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  "openai chat": openai.chat(MODEL),
  "openai responses": openai.responses(MODEL),
  anthropic: createAnthropic({ baseURL, apiKey })(MODEL),
};

for (const [name, model] of Object.entries(models)) {
  test(name, async () => {
    const asked = [];
    const speed = tool({
      description: "The speed of a machine.",
      inputSchema: z.object({ name: z.string() }),
      execute: ({ name }) => (asked.push(name), RESULT),
    });
    const stream = streamText({
      model,
      prompt: QUESTION,
      tools: { [TOOL]: speed },
      stopWhen: stepCountIs(3),
      maxRetries: 0,
      providerOptions: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } },
    });
    const kinds = new Set();
    for await (const part of stream.fullStream) {
      if (part.type === "error") throw part.error;
      kinds.add(part.type);
    }
    const steps = await stream.steps;
    assert.deepEqual(asked, ["pump ä"]);
    assert.deepEqual(steps.map(({ text }) => text), [SAYS, REPORT]);
    for (const kind of ["text-delta", "tool-input-delta", "tool-call", "tool-result"]) assert.ok(kinds.has(kind), kind);
    if (name === "anthropic") assert.equal(steps[0].reasoningText, THOUGHT);
    assert.ok((await stream.totalUsage).outputTokens > 0);
  });
}
