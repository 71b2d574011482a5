"""Where the service leaves places to go back to, with a store or without."""
from client_shapes import CLIENTS
from host import system, user

PI = CLIENTS[-1]


def test_places_are_left_before_the_first_question_every_2048_tokens_and_around_the_answer(host):
    running = host(["Plan.</think>Yes."])
    conversation = PI.conversation(system("Be brief. " * 300), user("What? " * 400))
    reply = running.ask(conversation)
    anchor = reply.prompt - running.tail(conversation, 1)
    header = reply.prompt - 2                                   # <|Assistant|><think>
    marks = running.service.scheduler.slots[0].session.marks
    every = range(2048, reply.prompt, 2048)
    assert marks == sorted({anchor, *every, header, reply.prompt, reply.state})
