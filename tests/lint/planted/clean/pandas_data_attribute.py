import pandas as pd
import requests


def frame(url):
    reply = requests.get(url, timeout=10)
    table = pd.DataFrame(reply.json()["data"])
    table["value"] -= table["value"].mean()
    return table
