"""A process that has imported everything and forks a copy of itself for each command line, in milliseconds.

Reads one JSON object per line: {"arguments": [...], "environment": {...}, "output": path, "errors": path} or
{"wait": pid}; answers with the process id or the exit code (minus the signal where one ended the process).
"""

import json
import os
import sys
import traceback

import torch

from patchcert.cli.app import run


def child(order):
    os.environ.update(order["environment"])
    for name, number in (("output", 1), ("errors", 2)):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    code = 1
    try:
        code = run(order["arguments"]) if "arguments" in order else execute(order["code"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def execute(code):
    exec(code, {})  # the tests' own text
    return 0


def say(answer):
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def main():
    torch.set_num_threads(1)
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            status = os.waitpid(order["wait"], 0)[1]
            say(os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            child(order)
        say(pid)


if __name__ == "__main__":
    main()
