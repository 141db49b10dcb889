import torch, os
torch.set_num_threads(1)
import logging; logging.getLogger("torch.__trace").propagate=False
def pytest_terminal_summary(terminalreporter):
    import collections
    c=collections.Counter()
    for rs in terminalreporter.stats.values():
        for r in rs:
            for k,v in getattr(r,'user_properties',[]):
                for kk,vv in v.items():
                    if isinstance(vv,int): c[kk]+=vv
                for m in v['messages']: print(v['op'],m[:300])
    print(c)
