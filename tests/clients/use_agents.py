"""pydantic-ai, openai-agents and langgraph: loops in which the model calls tools.

The model is small, so the first turn has to call (``tool_choice``: ``required``) and the next one
may not. What is called, with which arguments and how often, is the model's choice.
"""

import asyncio
import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import agents
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelMessage, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]
QUESTION = "What are the weather and the time in Ulm?"
TOWN = "Name a town in Japan, and how large it is."
MOST_TOKENS = 64

City = Annotated[str, Field(max_length=12)]
Zone = Literal["utc", "local"]
called = list[str]()


class Town(BaseModel):
    """A town."""

    name: City
    size: Literal["small", "large"]


def weather(city: City) -> str:
    """The weather in a city."""
    called.append("weather")
    return f"It rains in {city}."


def clock(zone: Zone) -> str:
    """The time in a zone."""
    called.append("clock")
    return f"It is noon in {zone}."


TOOLS = [weather, clock]


# ---------------------------------------------------------------- pydantic-ai


@dataclass
class Steps(AbstractCapability[None]):
    """The ``tool_choice`` of the first step and of all later ones."""

    first: Any = "required"
    later: Any = "none"

    def get_model_settings(self) -> Any:
        return lambda ctx: {"tool_choice": self.first if ctx.run_step == 1 else self.later}


def pydantic_agent(steps: Steps, output: Any = str) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return Agent(
        OpenAIChatModel(model, provider=provider),
        output_type=output,
        tools=TOOLS,
        model_settings=ModelSettings(temperature=0, max_tokens=MOST_TOKENS),
        capabilities=[steps],
    )


def check_history(messages: list[ModelMessage]) -> None:
    """Each call has arguments and one result."""
    parts = [part for message in messages for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    results = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert calls
    assert [call.tool_call_id for call in calls] == [one.tool_call_id for one in results]
    assert all(call.args_as_dict() for call in calls)


async def pydantic_text() -> None:
    agent = pydantic_agent(Steps())
    whole = await agent.run(QUESTION)
    check_history(whole.all_messages())
    assert whole.output
    assert whole.usage.output_tokens > 0
    async with agent.run_stream(QUESTION) as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == whole.output
        check_history(stream.all_messages())


async def pydantic_structured() -> None:
    """A structured answer beside tools: by a schema, and as the call of a tool of its own."""
    by_schema = pydantic_agent(Steps("auto", "none"), NativeOutput(Town))
    after_call = pydantic_agent(Steps("required", "none"), NativeOutput(Town))
    by_tool = pydantic_agent(Steps(["weather"], ["final_result"]), ToolOutput(Town))
    for agent in (by_schema, after_call, by_tool):
        assert isinstance((await agent.run(TOWN)).output, Town)
        async with agent.run_stream(TOWN) as stream:
            assert isinstance([found async for found in stream.stream_output()][-1], Town)


# ---------------------------------------------------------------- openai-agents


class OneRound(agents.AgentHooks[None]):
    """After its tools have run, an agent may not call any: a small model would go on for ever."""

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        agent.model_settings = replace(agent.model_settings, tool_choice="none")


def openai_agent(**more: Any) -> agents.Agent[None]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    return agents.Agent(
        name="helper",
        instructions="Be brief.",
        model=agents.OpenAIChatCompletionsModel(model=model, openai_client=client),
        tools=[agents.function_tool(one) for one in TOOLS],
        model_settings=agents.ModelSettings(
            temperature=0,
            max_tokens=MOST_TOKENS,
            tool_choice="required",
            parallel_tool_calls=True,
            include_usage=True,
        ),
        hooks=OneRound(),
        reset_tool_choice=False,
        **more,
    )


async def openai_agents() -> None:
    agents.set_tracing_disabled(disabled=True)
    for output in (None, Town):
        whole = await agents.Runner.run(openai_agent(output_type=output), QUESTION)
        stream = agents.Runner.run_streamed(openai_agent(output_type=output), QUESTION)
        events = [event async for event in stream.stream_events()]
        assert any(event.type == "raw_response_event" for event in events)
        for run in (whole, stream):
            kinds = [item.type for item in run.new_items]
            assert kinds.count("tool_call_item") == kinds.count("tool_call_output_item") > 0
            assert isinstance(run.final_output, output or str)
            assert run.final_output
        assert whole.final_output == stream.final_output
        assert stream.context_wrapper.usage.output_tokens > 0


# ---------------------------------------------------------------- langgraph


def graph() -> Any:
    """A model and its tools, in turns."""
    common = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0}
    chat = ChatOpenAI(max_tokens=MOST_TOKENS, stream_usage=True, **common)

    def ask(state: MessagesState) -> dict[str, Any]:
        has_results = any(isinstance(one, ToolMessage) for one in state["messages"])
        choice = "none" if has_results else "required"
        bound = chat.bind_tools(TOOLS, tool_choice=choice)
        return {"messages": [bound.invoke(state["messages"])]}

    built = StateGraph(MessagesState)
    built.add_node("model", ask)
    built.add_node("tools", ToolNode(TOOLS))
    built.add_edge(START, "model")
    built.add_conditional_edges("model", tools_condition)
    built.add_edge("tools", "model")
    return built.compile()


async def langgraph_loop() -> None:
    asked = {"messages": [("user", QUESTION)]}
    whole = graph().invoke(asked)["messages"]
    calls = [call["id"] for one in whole if isinstance(one, AIMessage) for call in one.tool_calls]
    assert calls
    assert calls == [one.tool_call_id for one in whole if isinstance(one, ToolMessage)]
    assert whole[-1].content
    assert not any(one.invalid_tool_calls for one in whole if isinstance(one, AIMessage))
    streamed = [chunk for chunk, _ in graph().stream(asked, stream_mode="messages")]
    texts = [chunk.content for chunk in streamed if isinstance(chunk, AIMessageChunk)]
    assert "".join(texts) == whole[-1].content


async def main() -> None:
    for loop in (pydantic_text, pydantic_structured, openai_agents, langgraph_loop):
        called.clear()
        await loop()
        assert called, loop


asyncio.run(main())
