import os
import subprocess
import sys

processes = []
for local_rank in range(2):
    env = {**os.environ, "RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "2"}
    processes.append(subprocess.Popen([sys.executable, "train.py"], env=env))
for process in processes:
    process.wait()  # here: left, a program of its own: nothing of torch is called
