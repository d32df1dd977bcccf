// A conversation as a file: Markdown to read, JSON with the messages of the chat API and its reasoning to read again.

import { shortTitle } from "./history.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result", system: "System" };
const ROLES = Object.keys(WHO);

export function asMarkdown(title, messages) {
  const parts = messages.map(({ role, content, reasoning, tool_calls: calls }) => [
    `**${WHO[role]}**`,
    reasoning ? `> ${reasoning.replaceAll("\n", "\n> ")}` : "",
    ...imagesOf(content).map(() => "[image]"),
    textOf(content),
    ...(calls ?? []).map((call) => `\`\`\`json\n${JSON.stringify(call.function)}\n\`\`\``),
  ].filter(Boolean).join("\n\n"));
  return `# ${title}\n\n${parts.join("\n\n---\n\n")}\n`;
}

/** Whether content is texts and pictures, as this page sends them. */
const isParts = (content) => Array.isArray(content) && content.every((part) => (
  part?.type === "text" ? typeof part.text === "string" : part?.type === "image_url" && String(part.image_url?.url).startsWith("data:image/")));

const textOf = (content) => (Array.isArray(content) ? content.flatMap((part) => part.text ?? []).join("\n") : content ?? "");

const imagesOf = (content) => (Array.isArray(content) ? content.flatMap((part) => part.image_url?.url ?? []) : []);

export const asJson = (title, messages) => `${JSON.stringify({ title, messages }, null, 2)}\n`;

/** {title, system, messages} of such JSON. Throws an Error. */
export function fromJson(text) {
  const { title, messages } = JSON.parse(text) ?? {};
  if (!Array.isArray(messages)) throw new Error("messages is not a list");
  const read = messages.map((message, index) => {
    const { role, content, reasoning, tool_calls: calls, tool_call_id: callId } = message ?? {};
    if (!ROLES.includes(role)) throw new Error(`messages[${index}].role is ${JSON.stringify(role)?.slice(0, 80)}, allowed are ${ROLES.join(", ")}`);
    if (typeof (content ?? "") !== "string" && !(role === "user" && isParts(content))) throw new Error(`messages[${index}].content is not a text`);
    const pictures = imagesOf(content).map((url, number) => ({ name: `image ${number + 1}`, url }));
    if (role !== "assistant") return { role, text: textOf(content), ...(pictures.length && { pictures }), ...(callId && { callId: String(callId) }) };
    const read = (Array.isArray(calls) ? calls : []).map((call) => ({
      id: String(call?.id ?? ""), name: String(call?.function?.name ?? ""), arguments: String(call?.function?.arguments ?? ""),
    }));
    return { role, text: content ?? "", reasoning: String(reasoning ?? ""), calls: read, state: "done", error: "", stats: {}, finish: null };
  });
  const system = read.filter((message) => message.role === "system").map((message) => message.text).join("\n");
  return { title: typeof title === "string" ? shortTitle(title) : "", system, messages: read.filter((message) => message.role !== "system") };
}
