class Stream:
    def __init__(self, items):
        self.items = list(items)

    def next(self):
        return self.items.pop(0)


def read(loader):
    stream = Stream(loader)
    return stream.next()


print(read([1, 2, 3]))
