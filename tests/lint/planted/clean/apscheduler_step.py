import sched
import time

from simulation import Optimizer

scheduler = sched.scheduler(time.time, time.sleep)
optimizer = Optimizer(lr=0.1)
scheduler.enter(1, 1, print, ("tick",))
for epoch in range(3):
    scheduler.run()
    optimizer.step(epoch)
