"""From what was seen in a training to reasons why it does not learn."""
