"""One process of `reward_pool`: rates what it is sent until the trainer is gone.

It is in a session of its own, so that an interrupt in the terminal is the trainer's to handle.
"""

import sys
from multiprocessing.connection import Connection

from truestep.environments.rewards import RewardError, load_reward, rate


def serve(name: str, connection: Connection) -> None:
    try:
        reward = load_reward(name)
    except RewardError as error:
        connection.send((None, str(error)))
        return
    connection.send((None, None))
    while True:
        try:
            prompt, completion = connection.recv()
        except (EOFError, OSError):
            return
        value, problem = None, None
        try:
            value = rate(reward, prompt, completion)
        except RewardError as error:
            problem = str(error)
        connection.send((value, problem))


if __name__ == "__main__":
    serve(sys.argv[1], Connection(int(sys.argv[2])))
