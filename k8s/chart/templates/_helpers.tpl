{{/* The image of every container. */}}
{{- define "triptych.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The objects of one of our files, in the namespace of the release. */}}
{{- define "triptych.objects" -}}
{{- $release := .root.Release.Namespace -}}
{{- $labels := .labels | default dict -}}
{{- range splitList "\n---\n" (.root.Files.Get .file) }}
{{- $object := fromYaml . }}
{{- $_ := set $object.metadata "namespace" $release }}
{{- $_ := set $object.metadata "labels" (merge $labels $object.metadata.labels) }}
---
{{ toYaml $object }}
{{ end -}}
{{- end }}

{{/* Change a pod in place: images, the volume of the weights, the model that is waited for. */}}
{{- define "triptych.pod" -}}
{{- $root := .root -}}
{{- $claim := $root.Values.models.existingClaim -}}
{{- range concat (.pod.initContainers | default list) .pod.containers }}
{{- $_ := set . "image" (include "triptych.image" $root) }}
{{- if ne $root.Values.image.pullPolicy "IfNotPresent" }}
{{- $_ := set . "imagePullPolicy" $root.Values.image.pullPolicy }}
{{- end }}
{{- if or (eq .name "wait-for-model") (eq .name "fetch") }}
{{- $_ := set . "command" (append (initial .command) $root.Values.model) }}
{{- end }}
{{- end }}
{{- range $root.Values.image.pullSecrets }}
{{- $secrets := $.pod.imagePullSecrets | default list }}
{{- $_ := set $.pod "imagePullSecrets" (append $secrets (dict "name" .)) }}
{{- end }}
{{- range .pod.volumes }}
{{- if and $claim (hasKey . "persistentVolumeClaim") }}
{{- $_ := set .persistentVolumeClaim "claimName" $claim }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where a pod may run. */}}
{{- define "triptych.place" -}}
{{- if .values.nodeSelector }}{{- $_ := set .pod "nodeSelector" .values.nodeSelector }}{{- end }}
{{- if .values.tolerations }}{{- $_ := set .pod "tolerations" .values.tolerations }}{{- end }}
{{- if .values.resources }}
{{- $_ := set (index .pod.containers 0) "resources" .values.resources }}
{{- end }}
{{- end }}
