"""How the processes of a job are started, watched from outside, and ended, on one machine or several."""
