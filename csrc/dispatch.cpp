#include "dispatch.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tiling.h"

namespace memeff {
namespace {

using std::to_string;

std::string kilobytes(int64_t bytes) { return to_string((bytes + 1023) / 1024) + " KB"; }

// Shared memory a block may opt into, bytes, and SMs of the usual chip: CUDA programming guide, compute capabilities.
struct ChipFacts {
  int32_t sm, smem_optin, sm_count;
};
constexpr ChipFacts kChips[] = {
    {70, 96 * 1024, 80},  {75, 64 * 1024, 40},   {80, 163 * 1024, 108},  {86, 99 * 1024, 84},   {87, 163 * 1024, 16},
    {89, 99 * 1024, 142}, {90, 227 * 1024, 132}, {100, 227 * 1024, 148}, {120, 99 * 1024, 188},
};

// Into how many parts a forward row's keys may be cut (forward_plan.cpp).
int64_t most_parts(const KernelRow& row, const Request& request) {
  if (!row.partial) return 1;
  return std::clamp<int64_t>(request.keys / row.tile_n / kMinKeyBlocks, 1, kMaxKeyParts);
}

// Of a backward row's kernels that with the fewest blocks counts.
double blocks_per_sm(const KernelRow& row, const Request& request) {
  const bool backward = row.kind == Pass::kBackward;
  const int64_t length = backward ? std::min(request.queries, request.keys) : request.queries;
  const double blocks = double(request.batch) * double(request.heads) * double(ceil_div(length, row.tile_m)) *
                        double(row.slabs(request.value_dim));
  return blocks * double(most_parts(row, request)) / double(request.sm_count);
}

bool has_code(const KernelRow& row, const Request& request) {
  if (request.any_build || is_host_only()) return true;
  if (!row.is_built()) return false;
  for (int32_t sass : row.sass) {
    if (sass == 0) break;
    if (code_runs(sass, row.arch_specific, false, request.sm)) return true;
  }
  return row.ptx != 0 && code_runs(row.ptx, false, true, request.sm);
}

constexpr char kFamily[] = "family:";

// The family that a request asks for; empty: any.
std::string family_of(const Request& request) {
  constexpr size_t kPrefix = sizeof kFamily - 1;
  return request.variant.compare(0, kPrefix, kFamily) == 0 ? request.variant.substr(kPrefix) : "";
}

// Is the row chosen, rather than named?
bool is_automatic(const Request& request) { return request.variant.empty() || !family_of(request).empty(); }

// Full rows have both features: forward ones serve every call with dropout, backward ones every call with a bias,
// dropout or both. Other rows serve calls with exactly their features.
bool takes_dropout(const KernelRow& row, const Request& request) {
  if (row.kind == Pass::kBackward && row.is_full()) return true;  // takes_bias decides
  return row.dropout == request.dropout;
}

bool takes_bias(const KernelRow& row, const Request& request) {
  if (row.kind == Pass::kBackward && row.is_full()) return request.has_bias || request.dropout;
  return row.is_full() || row.bias == request.has_bias;
}

// Rows that are chosen for the blocks that run at once: does the shared memory of an SM hold as many? 1 KB of it is the
// system's, and so is 1 KB of each block.
// Two fill each other's gaps; a third is welcome.
bool fits_its_blocks(const KernelRow& row, const Request& request) {
  return !row.adds_query || std::min(row.blocks_per_sm, 2) * (row.smem_bytes + 1024) <= request.smem_optin + 1024;
}

std::string built_for(const KernelRow& row) {
  if (!row.is_built()) return "is not built";
  std::string text = "is built for";
  for (int32_t sass : row.sass)
    if (sass != 0) text += " sm_" + to_string(sass);
  return row.ptx == 0 ? text : text + " and newer";
}

std::string preferred_range(const KernelRow& row) {
  if (row.max_sm >= 999) return "sm_" + to_string(row.min_sm) + " and newer";
  if (row.max_sm == row.min_sm) return "sm_" + to_string(row.min_sm);
  return "sm_" + to_string(row.min_sm) + " to sm_" + to_string(row.max_sm);
}

// What makes queries few. A backward row computes S as the forward's row did, so it counts the rows of packed heads
// too.
int64_t rows_of_queries(const Request& r) {
  return r.pass == Pass::kBackward && forward_packs(r) ? r.queries * r.heads_per_key : r.queries;
}

// What a request must meet, cheapest and most telling first. `automatic` rules hold back only the automatic choice.
struct Rule {
  bool automatic;
  bool (*fits)(const KernelRow&, const Request&);
  std::string (*reason)(const KernelRow&, const Request&);
};

// The first row that fits and takes operands as they are: what follows a row of parts.
const KernelRow* first_whole(Request request);

constexpr Rule kRules[] = {
    {false, [](const KernelRow& k, const Request& r) { return k.kind == r.pass; },
     [](const KernelRow& k, const Request&) {
       return std::string(k.kind == Pass::kForward ? "is for the forward pass" : "is for the backward pass");
     }},
    {false,
     [](const KernelRow& k, const Request& r) {
       return r.variant.empty() || !is_automatic(r) || family_of(r) == k.family;
     },
     [](const KernelRow& k, const Request& r) {
       return std::string("is of the family ") + k.family + ", asked for is " + family_of(r);
     }},
    {false, [](const KernelRow& k, const Request& r) { return k.dtype == r.dtype; },
     [](const KernelRow& k, const Request& r) {
       return std::string("takes ") + dtype_name(k.dtype) + ", not " + dtype_name(r.dtype);
     }},
    {true, [](const KernelRow& k, const Request& r) { return k.min_sm <= r.sm && r.sm <= k.max_sm; },
     [](const KernelRow& k, const Request& r) {
       return "is for " + preferred_range(k) + ", the GPU is sm_" + to_string(r.sm);
     }},
    {false, has_code,
     [](const KernelRow& k, const Request& r) {
       return built_for(k) + ", no code for sm_" + to_string(r.sm) + " in this build";
     }},
    {false, [](const KernelRow& k, const Request& r) { return k.math == Math::kIeee || r.math == Math::kTf32; },
     [](const KernelRow&, const Request&) {
       return std::string("computes in TF32, which torch does not allow now (torch.backends.cuda.matmul)");
     }},
    {false, takes_dropout,
     [](const KernelRow& k, const Request&) {
       return std::string(k.dropout ? "is for dropout, p is 0" : "takes no dropout, p is not 0");
     }},
    {false, takes_bias,
     [](const KernelRow& k, const Request&) {
       if (k.kind == Pass::kBackward && k.is_full()) return std::string("is for a bias or dropout, neither is given");
       return std::string(k.bias ? "is for a bias, none is given" : "takes no bias, one is given");
     }},
    {false, [](const KernelRow& k, const Request& r) { return k.pages || !r.paged; },
     [](const KernelRow&, const Request&) { return std::string("reads no keys through a block table"); }},
    {false, [](const KernelRow& k, const Request& r) { return k.partial || !r.partial; },
     [](const KernelRow&, const Request&) { return std::string("writes no results in fp32"); }},
    {false,
     [](const KernelRow& k, const Request& r) {
       return !r.has_bias || k.bias_alignment == 0 ||
              (r.bias_alignment != 0 && r.bias_alignment % k.bias_alignment == 0);
     },
     [](const KernelRow& k, const Request&) {
       return "takes a bias of the query's dtype, not of packed sequences, whose last stride is 1 and whose address "
              "and other strides are multiples of " +
              to_string(k.bias_alignment) + " elements";
     }},
    {false, [](const KernelRow& k, const Request& r) { return !k.adds_query || !r.deterministic; },
     [](const KernelRow&, const Request&) {
       return std::string("adds up dQ in no fixed order, torch.use_deterministic_algorithms asks for one");
     }},
    {false, [](const KernelRow& k, const Request& r) { return k.max_k == 0 || r.head_dim <= k.max_k; },
     [](const KernelRow& k, const Request& r) {
       return "takes K up to " + to_string(k.max_k) + ", K is " + to_string(r.head_dim);
     }},
    {false, [](const KernelRow& k, const Request& r) { return k.max_kv == 0 || r.value_dim <= k.max_kv; },
     [](const KernelRow& k, const Request& r) {
       return "takes Kv up to " + to_string(k.max_kv) + ", Kv is " + to_string(r.value_dim);
     }},
    {false, [](const KernelRow& k, const Request& r) { return k.sequences || !r.sequences; },
     [](const KernelRow&, const Request&) { return std::string("takes no packed sequences"); }},
    {false, [](const KernelRow& k, const Request& r) { return k.max_n == 0 || r.keys <= k.max_n; },
     [](const KernelRow& k, const Request& r) {
       return "takes N up to " + to_string(k.max_n) + ", N is " + to_string(r.keys);
     }},
    {false,
     [](const KernelRow& k, const Request& r) {
       return k.max_n == 0 || k.kind == Pass::kForward || r.queries <= k.max_n;
     },
     [](const KernelRow& k, const Request& r) {
       return "takes M up to " + to_string(k.max_n) + ", M is " + to_string(r.queries);
     }},
    {false,
     [](const KernelRow& k, const Request& r) {
       return k.max_n == 0 || k.kind == Pass::kForward || r.heads_per_kv == 1;
     },
     [](const KernelRow&, const Request& r) {
       return "takes a key head for each query head, here " + to_string(r.heads_per_kv) + " share one";
     }},
    {false, [](const KernelRow& k, const Request& r) { return r.alignment % k.alignment == 0; },
     [](const KernelRow& k, const Request& r) {
       return "needs addresses, strides, K and Kv in multiples of " + to_string(k.alignment) +
              " elements, here they share " + to_string(r.alignment);
     }},
    {false, [](const KernelRow& k, const Request& r) { return k.smem_bytes <= r.smem_optin; },
     [](const KernelRow& k, const Request& r) {
       return "needs " + kilobytes(k.smem_bytes) + " of shared memory a block, sm_" + to_string(r.sm) + " has " +
              kilobytes(r.smem_optin);
     }},
    {true, [](const KernelRow& k, const Request& r) { return r.queries >= k.min_m; },
     [](const KernelRow& k, const Request& r) {
       return "is chosen for M from " + to_string(k.min_m) + " on, M is " + to_string(r.queries);
     }},
    {true, [](const KernelRow& k, const Request& r) { return blocks_per_sm(k, r) >= k.min_blocks_per_sm; },
     [](const KernelRow&, const Request&) { return std::string("is for grids that fill the GPU, this one is small"); }},
    {true,
     [](const KernelRow& k, const Request& r) {
       const bool few_queries = k.max_m != 0 && rows_of_queries(r) <= k.max_m;
       const bool small_grid = k.max_blocks_per_sm != 0 && blocks_per_sm(k, r) <= k.max_blocks_per_sm;
       return (k.max_m == 0 && k.max_blocks_per_sm == 0) || few_queries || small_grid;
     },
     [](const KernelRow& k, const Request& r) {
       return "is chosen for M up to " + to_string(k.max_m) + " or grids that larger tiles do not fill, M is " +
              to_string(rows_of_queries(r));
     }},
    {true, [](const KernelRow& k, const Request& r) { return k.parts() == 0 || !r.lse; },
     [](const KernelRow&, const Request&) {
       return std::string(
           "is chosen where no gradient and no log-sum-exp is wanted: backward kernels compute scores "
           "by other products");
     }},
    {true, fits_its_blocks,
     [](const KernelRow& k, const Request&) {
       return "is chosen where an SM holds " + to_string(std::min(k.blocks_per_sm, 2)) + " blocks of " +
              kilobytes(k.smem_bytes);
     }},
    {true,
     [](const KernelRow& k, const Request& r) {
       return k.causal_length == 0 || (r.causal && std::max(r.queries, r.keys) <= k.causal_length);
     },
     [](const KernelRow& k, const Request&) {
       return "is chosen for causal calls with M and N up to " + to_string(k.causal_length);
     }},
    {true, [](const KernelRow& k, const Request& r) { return std::max(r.head_dim, r.value_dim) > k.min_k; },
     [](const KernelRow& k, const Request&) { return "is chosen for K or Kv beyond " + to_string(k.min_k); }},
    {true, [](const KernelRow& k, const Request& r) { return std::max(r.queries, r.keys) > k.min_length; },
     [](const KernelRow& k, const Request&) { return "is chosen for M or N beyond " + to_string(k.min_length); }},
    {false, [](const KernelRow& k, const Request& r) { return k.parts() == 0 || first_whole(r) != nullptr; },
     [](const KernelRow&, const Request&) {
       return std::string("hands rows of very different size to a kernel of whole operands, and none fits here");
     }},
};

bool fits(const KernelRow& row, const Request& request) {
  for (const Rule& rule : kRules)
    if (!rule.fits(row, request)) return false;
  return true;
}

const KernelRow* first_whole(Request request) {
  request.variant = "";
  for (int i = 0; i < kKernelCount; ++i)
    if (kKernelTable[i].parts() == 0 && fits(kKernelTable[i], request)) return &kKernelTable[i];
  return nullptr;
}

const KernelRow* find(const std::string& name) {
  for (int i = 0; i < kKernelCount; ++i)
    if (name == kKernelTable[i].name) return &kKernelTable[i];
  return nullptr;
}

const KernelRow* first_fitting(const Request& request) {
  for (int i = 0; i < kKernelCount; ++i)
    if (fits(kKernelTable[i], request)) return &kKernelTable[i];
  return nullptr;
}

// Does a row that the request's `variant` leaves write parts?
bool may_write_parts(const Request& request) {
  const std::string family = family_of(request);
  for (int i = 0; i < kKernelCount; ++i) {
    const KernelRow& row = kKernelTable[i];
    if (row.partial && (family.empty() ? request.variant == row.name : family == row.family)) return true;
  }
  return false;
}

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

std::string unknown_variant(const std::string& name) {
  return "no kernel variant is named \"" + name + "\"; `python -m memeff_attn.info` lists the " +
         to_string(kKernelCount) + " there are";
}

// Why a request's `variant` says nothing; empty where it does, or is empty.
std::string unknown(const Request& request) {
  if (request.variant.empty()) return "";
  if (!is_automatic(request)) return find(request.variant) == nullptr ? unknown_variant(request.variant) : "";
  const std::string family = family_of(request);
  std::string known;
  for (int i = 0; i < kKernelCount; ++i) {
    const std::string name = kKernelTable[i].family;
    if (name == family) return "";
    if (known.find(name) == std::string::npos) known += (known.empty() ? "" : ", ") + name;
  }
  return "no kernel family is named \"" + family + "\"; there are " + known;
}

std::string request_line(const Request& r) {
  return std::string(r.pass == Pass::kForward ? "forward, " : "backward, ") + dtype_name(r.dtype) +
         (r.math == Math::kTf32 ? " (TF32 allowed)" : "") + ", B " + to_string(r.batch) + ", M " +
         to_string(r.queries) + ", N " + to_string(r.keys) + ", H " + to_string(r.heads) + ", K " +
         to_string(r.head_dim) + ", Kv " + to_string(r.value_dim) + ", common alignment " + to_string(r.alignment) +
         (r.has_bias ? ", with bias" : ", no bias") + (r.bias_grad ? " and its gradient" : "") +
         (r.dropout ? ", with dropout" : "") + (r.deterministic ? ", deterministic" : "") + ", on sm_" +
         to_string(r.sm);
}

std::string row_facts(const KernelRow& row) {
  const bool forward = row.kind == Pass::kForward;
  return "tile " + to_string(row.tile_m) + (forward ? " queries x " : " of its own x ") + to_string(row.tile_n) +
         (forward ? " keys, value tile " : " in the loop, output columns ") + to_string(row.value_tile) + ", " +
         to_string(row.threads) + " threads, " + kilobytes(row.smem_bytes) + " of shared memory";
}

// Why a choice may be slower than the user expects.
std::string note(const KernelRow& row, const Request& r) {
  if (std::strcmp(row.arch, "simt") == 0)
    return "\n  note: sm_" + to_string(r.sm) + " has no tensor-core path for " + dtype_name(r.dtype) +
           " in this library; SIMT computes in fp32, slower";
  const int32_t best = r.dtype == DType::kF32 ? 4 : 8;  // elements in 16 bytes
  if (row.alignment > 1 || r.alignment >= best) return "";
  return "\n  note: addresses, strides, K and Kv share only " + to_string(r.alignment) + " elements of alignment; " +
         to_string(best) + " run faster";
}

std::string others(const KernelRow* chosen, const Request& request) {
  const int limit = chosen != nullptr ? 1 : 2;  // where nothing fits, the user looks for the nearest miss
  // Groups in order of first appearance, each with the names of its rows.
  std::vector<std::pair<std::string, std::vector<std::string>>> groups;
  std::map<std::string, size_t> index;
  for (int i = 0; i < kKernelCount; ++i) {
    const KernelRow& row = kKernelTable[i];
    if (&row == chosen) continue;
    std::string text = join(reasons(row, request, false, limit), "; ");
    if (text.empty()) text = "fits too, comes later in the list";
    const auto [at, is_new] = index.emplace(text, groups.size());
    if (is_new) groups.push_back({text, {}});
    groups[at->second].second.push_back(row.name);
  }
  constexpr size_t kShown = 4;  // names a line: enough to recognise the group
  std::string text;
  for (auto& [reason, names] : groups) {
    const size_t total = names.size();
    if (total > kShown) names.resize(kShown);
    text += "\n  - " + reason + ": " + join(names, ", ");
    if (total > kShown) text += " and " + to_string(total - kShown) + " more";
  }
  return text;
}

std::string no_kernel_text(const Request& request) {
  if (kKernelCount == 0) return "this build has no kernel at all";
  if (!request.any_build) {
    Request anywhere = request;
    anywhere.any_build = true;
    const KernelRow* row = first_fitting(anywhere);
    if (row != nullptr && std::strstr(kBuildInfo.archs, ("sm_" + to_string(request.sm)).c_str()) != nullptr)
      return std::string("this build leaves out ") + row->name + ", which would run";
    if (row != nullptr)
      return "this build has no code for sm_" + to_string(request.sm) + " (it has " + kBuildInfo.archs +
             "); one with MEMEFF_CUDA_ARCHS=" + to_string(request.sm) + " would run " + row->name;
  }
  const char* pass = request.pass == Pass::kForward ? "no kernel" : "no backward kernel";
  const std::string family = family_of(request);
  return pass + (family.empty() ? "" : " of the family " + family) + " takes " + dtype_name(request.dtype) + " on sm_" +
         to_string(request.sm) + " with these sizes";
}

}  // namespace

Request with_chip_facts(Request request) {
  ChipFacts facts = kChips[0];
  for (const ChipFacts& chip : kChips)
    if (chip.sm <= request.sm) facts = chip;
  if (request.smem_optin <= 0) request.smem_optin = facts.smem_optin;
  if (request.sm_count <= 0) request.sm_count = facts.sm_count;
  return request;
}

bool packs(const Request& r) { return r.pass == Pass::kForward && forward_packs(r); }

bool forward_packs(const Request& r) {
  if (r.heads_per_key == 1 || r.queries > kMaxPackedQueries) return false;
  if (!r.variant.empty() && !may_write_parts(r)) return false;  // packed rows may need their results copied
  return r.queries == 1 || r.batch * (r.heads / r.heads_per_key) * r.keys >= kMinPackedKeys;
}

Request packed(Request r) {
  if (!packs(r)) return r;
  r.queries *= r.heads_per_key;
  r.heads /= r.heads_per_key;
  r.heads_per_key = 1;
  r.partial = true;  // what the merge may have to put back; the same rows know a row's query
  return r;
}

const char* pass_name(Pass pass) { return pass == Pass::kForward ? "fwd" : "bwd"; }

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kF32:
      return "f32";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

bool is_host_only() {
  static const bool host_only = std::strcmp(kBuildInfo.cuda_version, "none") == 0;
  return host_only;
}

std::vector<std::string> reasons(const KernelRow& row, const Request& request, bool forced, int limit) {
  std::vector<std::string> found;
  if (row.kind != request.pass) return {kRules[0].reason(row, request)};  // beside it nothing else matters
  for (const Rule& rule : kRules) {
    if (forced && rule.automatic) continue;
    if (!rule.fits(row, request)) found.push_back(rule.reason(row, request));
    if (int(found.size()) == limit) break;
  }
  return found;
}

Status select(const Request& asked, const KernelRow** row) {
  const Request request = packed(with_chip_facts(asked));
  *row = nullptr;
  if (const std::string text = unknown(request); !text.empty()) return {Code::kInvalid, text};
  if (is_automatic(request)) {
    *row = first_fitting(request);
    if (*row == nullptr) return {Code::kUnsupported, explain(request)};
    return {};
  }
  const KernelRow* forced = find(request.variant);
  if (!reasons(*forced, request, true, 1).empty()) return {Code::kUnsupported, explain(request)};
  *row = forced;
  return {};
}

Status select_whole(Request asked, const KernelRow** row) {
  asked.heads_per_key = 1;  // heads stay as the first row has them
  const Request request = packed(with_chip_facts(asked));
  *row = first_whole(request);
  if (*row != nullptr) return {};
  return {Code::kUnsupported, "no kernel without parts fits\n" + explain(request)};
}

std::string explain(const Request& asked) {
  const Request request = packed(with_chip_facts(asked));
  std::string text = request_line(with_chip_facts(asked));
  if (packs(asked))
    text += "\n  " + to_string(asked.heads_per_key) +
            " heads of a key head are the rows of one tile: to kernels M is " + to_string(request.queries) + ", H " +
            to_string(request.heads);
  if (is_host_only()) text += "\n  this build is host-only: it names the kernel but has no code for any GPU";
  const KernelRow* chosen = nullptr;
  if (const std::string wrong = unknown(request); !wrong.empty()) return text + "\nchosen: none; " + wrong;
  if (is_automatic(request)) {
    chosen = first_fitting(request);
    text += chosen ? std::string("\nchosen: ") + chosen->name + " (the first of the list that fits" +
                         (request.variant.empty() ? "" : " in the family " + family_of(request)) + "; " +
                         row_facts(*chosen) + ")"
                   : "\nchosen: none; " + no_kernel_text(request);
  } else {
    chosen = find(request.variant);
    const std::vector<std::string> against = reasons(*chosen, request, true, 8);
    if (!against.empty()) return text + "\nchosen: none; forced " + chosen->name + " " + join(against, "; ");
    text += std::string("\nchosen: ") + chosen->name + " (forced; " + row_facts(*chosen) + ")";
  }
  if (chosen != nullptr && chosen->parts() > 0)
    text += std::string("\n  where rows of an operand differ very much in size, which the GPU finds out: ") +
            first_whole(request)->name;
  if (chosen != nullptr) text += note(*chosen, request);
  const std::string rest = others(chosen, request);
  return rest.empty() ? text : text + "\nthe others:" + rest;
}

}  // namespace memeff
