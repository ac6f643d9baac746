"""Next-item models on FuxiCTR, one file each, listed here under the names of ``--task next-item``."""

from __future__ import annotations

NEXT_ITEM_MODELS = {
    "SASRec": "ctr_pe.model_zoo.next_item.sasrec:NextItemSASRec",
    "SASRecF": "ctr_pe.model_zoo.next_item.sasrecf:SASRecF",
    "DIFSR": "ctr_pe.model_zoo.next_item.dif_sr:DIFSR",
    "HSTU": "ctr_pe.model_zoo.next_item.hstu:NextItemHSTU",
    "CORE": "ctr_pe.model_zoo.next_item.core:CORE",
    "FDSA": "ctr_pe.model_zoo.next_item.fdsa:FDSA",
    "BERT4Rec": "ctr_pe.model_zoo.next_item.bert4rec:BERT4Rec",
    "GRU4Rec": "ctr_pe.model_zoo.next_item.gru4rec:GRU4Rec",
    "Popularity": "ctr_pe.model_zoo.next_item.popularity:Popularity",
}
